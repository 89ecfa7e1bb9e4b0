"""Reads modules of Flax NNX, and their variables.

A module is one node: ``nnx.split`` opens it and ``nnx.merge`` closes it, so that modules that occur
twice, counters and random streams stay Flax's own business. Source: Flax, ``flax.nnx.spmd``.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax.sharding import NamedSharding

from penzai_shard.readers.flax_linen import read_names
from penzai_shard.readers.reader import Content

# Where releases keep the names of the dimensions, the newest first.
_NAMES = ("out_sharding", "sharding", "sharding_names")
_EXAMPLE = 'nnx.with_partitioning(initializer, ("embed", "hidden"))'


class _Modules:
    library = "flax.nnx"

    def reads(self, kind: type) -> bool:
        return issubclass(kind, nnx.Pytree)

    def open(self, node: Any) -> Content:
        graph_definition, state = nnx.split(node)
        return Content(state, graph_definition, identity=id(node))

    def close(self, template: Any, data: Any) -> Any:
        return nnx.merge(template, data)

    def initializing(self) -> contextlib.AbstractContextManager[Any]:
        # NNX would lay parameters out itself, by names that need not be mesh axes.
        context: contextlib.AbstractContextManager[Any] = nnx.use_eager_sharding(False)  # type: ignore[no-untyped-call]
        return context

    def why_not(self, tree: Any) -> tuple[str, str] | None:
        if not isinstance(tree, nnx.GraphDef):
            return None
        return "nnx.GraphDef holds no arrays", "Give the module, nnx.merge(graphdef, state)."


@dataclasses.dataclass(frozen=True)
class _VariableTemplate:
    kind: type[nnx.Variable[Any]]
    metadata: dict[str, Any]


class _Variables:
    library = "flax.nnx"

    def reads(self, kind: type) -> bool:
        return issubclass(kind, nnx.Variable)

    def open(self, node: Any) -> Content:
        metadata, data = node.get_metadata(), node.get_raw_value()
        template = _VariableTemplate(type(node), metadata)
        role = "parameter" if isinstance(node, nnx.Param) else "state"
        given = next((metadata[key] for key in _NAMES if metadata.get(key) is not None), None)
        if given is None:
            # Keys and counters of random streams have nothing to name.
            is_random = isinstance(node, nnx.RngState)
            names = (None,) * len(getattr(data, "shape", ())) if is_random else None
            return Content(data, template, names, role=role, identity=id(node))
        given = given.spec if isinstance(given, NamedSharding) else given
        names, problem = read_names(given, "variable", _EXAMPLE)
        return Content(data, template, names, role=role, identity=id(node), problem=problem)

    def close(self, template: _VariableTemplate, data: Any) -> Any:
        return template.kind.from_metadata(data, dict(template.metadata))

    def is_live(self, node: Any) -> bool:
        return True

    def set_names(self, node: Any, names: Sequence[Any]) -> None:
        node.set_metadata(**{_NAMES[0]: tuple(names)})


READERS = [_Variables(), _Modules()]
