"""Traces the call of a model, and notes what goes into each of its layers and comes out.

Nothing runs, and variables stay as they are. Layers of this library that only lay out are passed by
where that is asked: what flows is the same, and one that fits nothing must not hide the rest.
"""

import dataclasses
import re
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.arrays.steps import make_struct
from penzai_shard.arrays.structure import Leaf, flatten, leaves_of
from penzai_shard.errors import Problem
from penzai_shard.findings.subject import Finding
from penzai_shard.inspection.layer_marks import is_layer
from penzai_shard.layers.constraints import ConstrainActivations
from penzai_shard.layers.manual import manual_axes
from penzai_shard.layers.pure_call import PureCall, read_settings
from penzai_shard.layers.shard_mapped import ShardMapped
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import auto_context
from penzai_shard.paths import join_paths, path_text
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.readers.reader import is_node
from penzai_shard.surgery.inserted import CONSTRAINTS


def trace(walk: "Walk | None", model: Any, batch: Any) -> Iterator[Finding]:
    """Traces the call of a model, whose variables stay as they are; gives what it fails with."""
    model = walk.record(model) if walk else model
    argument, side_inputs = batch, dict[str, Any]()
    if type(batch) is tuple and len(batch) == 2 and type(batch[1]) is dict:
        argument, side_inputs = batch
    elif type(batch) is dict and batch:
        (_, argument), *others = batch.items()
        side_inputs = dict(others)
    tree = {"argument": argument, "body": model, "side_inputs": side_inputs}
    leaves, structure = flatten(tree)
    call = PureCall(structure, read_settings(tree))

    def run(values: Any) -> None:
        call(values)

    try:
        with auto_context(), warnings.catch_warnings(action="ignore"):
            jax.eval_shape(run, [make_struct(leaf.value) for leaf in leaves])
    except Exception as error:  # A layer may fail in any way.
        failed, which = walk.failed if walk else None, "the model"
        if failed is not None:
            given = ", ".join(map(leaf_text, failed.inputs)) or "no array"
            which = f"this {type(failed.layer).__name__}, which gets {given},"
        problems = getattr(error, "problems", ())
        if not problems:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = re.sub(r"\b\w+Tracer\b", "array", " ".join(lines[:3])).rstrip(".")
            is_named = any(leaf.names for leaf in leaves_of(batch))
            fix = "" if is_named else "Name the batch: pz.nx.wrap(array, 'batch', 'seq')."
            problems = [Problem("", f"{type(error).__name__}: {said}", fix)]
        for own in problems:
            kind, what = own.kind or "uncallable", f"{which} cannot be called: {own.what}"
            yield Finding(kind, failed.place if failed else "model", what, own.fix)


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer; ``manual`` are the mesh axes that a region around it has taken over."""

    layer: Any
    place: str
    around: "Call | None"
    inputs: list[Leaf]
    manual: frozenset[str]
    outputs: list[Leaf] = dataclasses.field(default_factory=list)

    @property
    def chain(self) -> list["Call"]:
        """The calls around it and itself, the outermost first."""
        return [*(self.around.chain if self.around else ()), self]


class Walk:
    """Notes what goes into the layers of one model and comes out of them.

    Attributes:
        is_bare: Whether layers that only lay out are passed by.
        events: The calls, each when it begins and when it ends.
        failed: The innermost call that failed.
    """

    def __init__(self, is_bare: bool = True) -> None:
        self.is_bare = is_bare
        self.events: list[tuple[Call, str]] = []
        self.failed: Call | None = None
        self._running: list[Call] = []

    def record(self, node: Any, place: str = "") -> Any:
        """A model, or a part of it, with layers that report their calls."""
        if is_node(node) or jax.tree_util.all_leaves([node]):
            return node
        keyed, definition = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda child: child is not node
        )
        parts = [self.record(part, join_paths(place, path_text(keys))) for keys, part in keyed]
        copy: Any = jax.tree_util.tree_unflatten(definition, parts)
        return Recorded(copy, self, place) if is_layer(node) else copy

    @property
    def names(self) -> set[Hashable]:
        """The logical axes of all that flows."""
        leaves = [leaf for call, _ in self.events for leaf in (*call.inputs, *call.outputs)]
        return {name for leaf in leaves for name in leaf.names or () if name is not None}

    def run(self, layer: Any, place: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a layer."""
        around, manual = self._running[-1] if self._running else None, manual_axes()
        if around is not None:
            manual |= around.manual
            if isinstance(around.layer, ShardMapped):
                manual |= {*around.layer.mesh.axis_names}
        call = Call(layer, place, around, leaves_of(list(args)), manual)
        self.events.append((call, "inputs"))
        self._running.append(call)
        try:
            output = self._run(layer, args, kwargs)
            call.outputs = leaves_of(output)
        except Exception:
            self.failed = self.failed or call
            raise
        finally:
            self._running.pop()
            self.events.append((call, "outputs"))
        return output

    def _run(self, layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a layer computes, without what only lays it out or changes how it runs."""
        if not self.is_bare or getattr(layer, "per_device", False):
            return layer(*args, **kwargs)
        is_pin = isinstance(layer, CONSTRAINTS)
        if is_pin or isinstance(layer, ConstrainActivations):
            # Another value, so that a constraint behind another is seen.
            args = [jax.tree.map(jax.lax.optimization_barrier, args[0]), *args[1:]]
        if is_pin:
            return args[0]
        return (layer.body if isinstance(layer, WrapperLayer) else layer)(*args, **kwargs)


@pz.pytree_dataclass
class Recorded(WrapperLayer):
    """A layer around another that no other can tell from it: layers ask each other's types."""

    body: Any
    walk: Any = dataclasses.field(metadata={"pytree_node": False})
    place: str = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer in it."""
        fields = self.__dict__
        return fields["walk"].run(fields["body"], fields["place"], args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__dict__["body"].__class__ if "body" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__") and "body" in self.__dict__:
            return getattr(self.__dict__["body"], name)
        return super().__getattr__(name)


def leaf_text(leaf: Leaf) -> str:
    """An array by its axes: ``[batch=16, seq=8]``."""
    return f"[{row_of(leaf).axes_text}]"


def row_of(leaf: Leaf) -> LeafPlan:
    """An array as in a plan, which tells its size."""
    return LeafPlan(leaf.path, leaf.names, leaf.shape, leaf.dtype, None, None, "", 0)
