"""Variables of Flax NNX: parameters, statistics, random keys, and what optimizers keep.

Source: Flax, "Scale up on multiple devices" (NNX), ``flax.nnx.spmd`` and ``flax.core.spmd``.
"""

import contextlib
import re
import sys
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.readers.array_reader import ArrayReader, ReadArray, Role

# Under which keys releases keep the names of the dimensions: the newest, and older ones.
_NAMES = ("out_sharding", "sharding", "sharding_names")
# What else they say of sharding, and is no name: where and when a variable was laid out by NNX
# itself, and what nnx.Optimizer gives its own variables as their names.
_OTHERS = frozenset({"mesh", "eager_sharding", "optimizer_sharding"})
_OF_SHARDING = re.compile("shard|mesh|partition|spec")


class _NnxReader(ArrayReader):
    """Reads every kind of ``nnx.Variable``."""

    library = "flax.nnx"
    shares = True
    naming = (
        "Name it where its layer is made, with kernel_metadata={'out_sharding': (...)} or the like "
        "of it, or nnx.Param(array, out_sharding=(...))"
    )

    def reads(self, node_type: type) -> bool:
        variables = _nnx().variablelib
        return issubclass(node_type, (variables.Variable, variables.HijaxVariable))

    def shares_type(self, node_type: type) -> bool:
        return issubclass(node_type, _nnx().Pytree)

    def read(self, node: Any) -> ReadArray:
        if not isinstance(node, _nnx().Variable):
            return ReadArray(
                None,
                (),
                "it is a variable in the form that nnx.var_defaults(hijax=True) makes, which is "
                "not read. Make the model without that",
            )
        metadata = node.get_metadata()
        data = node.get_raw_value()
        if metadata.get("ref"):
            problem = "it holds a reference, as nnx.var_defaults(ref=True) makes them, which is "
            return ReadArray(None, (), problem + "not read. Make the model without that")
        names, problem = _names_in(metadata)
        if names is None and isinstance(node, _nnx().RngState):
            # Keys of random streams have nothing to name, as the one of a train state has not.
            return ReadArray(data, (), note="random state")
        return ReadArray(data, names, problem)

    def with_data(self, node: Any, data: Any) -> Any:
        return node.from_metadata(data, node.get_metadata())

    def role(self, node: Any) -> Role | None:
        return "parameter" if isinstance(node, _nnx().Param) else "state"

    def initializing(self) -> contextlib.AbstractContextManager[Any]:
        # Every array is laid out by its plan; NNX would need a mesh in the context, and take
        # logical axes for those of the mesh.
        context: contextlib.AbstractContextManager[Any] = _nnx().use_eager_sharding(False)
        return context


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _names_in(metadata: dict[str, Any]) -> tuple[tuple[Any, ...] | None, str]:
    """The names of the dimensions, or None, and why they cannot be used."""
    if metadata.get("sharding_rules"):
        rules = dict(metadata["sharding_rules"])
        return (), f"it has sharding_rules of its own. Leave them out, and give them as {rules=}"
    known = {*_NAMES, *_OTHERS, "sharding_rules"}
    unknown = [
        key for key in metadata if key not in known and _OF_SHARDING.search(str(key).lower())
    ]
    if unknown:
        keys = " and ".join(map(repr, unknown))
        return (), f"its metadata {keys} seem to be of sharding, and are not known"
    given = [metadata[key] for key in _NAMES if metadata.get(key) is not None]
    if not given:
        return None, ""
    names = given[0].spec if isinstance(given[0], NamedSharding) else given[0]
    if not isinstance(names, tuple | list | PartitionSpec):
        return (), f"its {type(names).__name__} as out_sharding is not read. Give a tuple of names"
    names = tuple(tuple(name) if isinstance(name, list) else name for name in names)
    if any(name is PartitionSpec.UNCONSTRAINED for name in names):
        return (), f"its names {names} leave a dimension to XLA. Give it a name, or None"
    return names, ""


READER = _NnxReader()
