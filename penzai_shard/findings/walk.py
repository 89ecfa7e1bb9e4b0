"""Traces the call of a model, and notes what goes into each of its layers and comes out.

Nothing runs, and variables stay as they are. A layer that only lays out and cannot be called is
noted and passed by: what flows is the same, and one that fits nothing must not hide the rest.
"""

import dataclasses
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from penzai_shard.arrays.inputs import make_struct
from penzai_shard.arrays.structure import Leaf, flatten, leaves_of
from penzai_shard.errors import Problem
from penzai_shard.findings.set_up import Finding
from penzai_shard.inspection.layer_marks import Mark, is_layer
from penzai_shard.layers.constraints import ConstrainActivations
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layers.manual import manual_axes
from penzai_shard.layers.pure_call import PureCall, read_settings
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import auto_context
from penzai_shard.planning.plan import write_axes
from penzai_shard.surgery.inserted import CONSTRAINTS
from penzai_shard.surgery.rewriting import Finder, Keys, Rewriter, keys_text

_PASSED_BY = (*CONSTRAINTS, ConstrainActivations, GatherParameters)


def trace_call(model: Any, batch: Any) -> Exception | None:
    """Traces the call of a model, whose variables stay as they are; returns what it fails with."""
    argument, side_inputs = batch, dict[str, Any]()
    if type(batch) is dict and batch:
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
        return error
    return None


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer.

    Attributes:
        layer: The layer.
        place: Where it stands in the model.
        layers: The layers that it is in, the outermost first, and itself.
        manual: The mesh axes that a region around it has taken over.
        inputs: What goes into it, side inputs left out.
        outputs: What comes out.
    """

    layer: Any
    place: str
    layers: tuple[Any, ...]
    manual: frozenset[str]
    inputs: list[Leaf]
    outputs: list[Leaf] = dataclasses.field(default_factory=list)


class Walk:
    """Notes what goes into the layers of one model and comes out of them.

    Attributes:
        events: The calls, each when it begins and when it ends.
    """

    def __init__(self) -> None:
        self.events: list[tuple[Call, str]] = []
        self._running: list[Any] = []
        # The innermost layer that failed is the last one.
        self._failures: list[tuple[Call | None, Exception]] = []
        self._has_ended = False

    @property
    def names(self) -> set[Hashable]:
        """The logical axes of all that flows."""
        leaves = [leaf for call, _ in self.events for leaf in (*call.inputs, *call.outputs)]
        return {name for leaf in leaves for name in leaf.names or () if name is not None}

    def follow(self, model: Any, batch: Any) -> Iterator[Finding]:
        """Traces the call of a model, and gives what its layers fail with."""

        def mark(layer: Any, keys: Keys) -> tuple[Any, ...]:
            return (Mark(layer, keys_text(keys), self),)

        layers = Finder(lambda node, keys, state: is_layer(node))
        marked = Rewriter(layers, mark, order="inner first", by_node=False).run(model)
        error = trace_call(marked, batch)
        if error is not None and not self._has_ended:
            self._failures.append((None, error))
        for call, error in self._failures:
            yield from _read_failure(call, error, batch)

    def call_layer(
        self, place: str, layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls a marked layer."""
        self._running.append(layer)
        call = Call(layer, place, (*self._running,), manual_axes(), leaves_of(list(args)))
        self.events.append((call, "inputs"))
        try:
            output = layer(*args, **kwargs)
        except Exception as error:
            if not self._has_ended:
                self._failures.append((call, error))
            self._has_ended |= not isinstance(layer, _PASSED_BY)
            if self._has_ended:
                raise
            is_around = isinstance(layer, WrapperLayer)
            output = layer.body(*args, **kwargs) if is_around else args[0]
        finally:
            self._running.pop()
            self.events.append((call, "outputs"))
        call.outputs = leaves_of(output)
        return output


def _read_failure(call: Call | None, error: Exception, batch: Any) -> Iterator[Finding]:
    """What a layer fails with, in sentences."""
    place, which = "model", "the model"
    if call is not None:
        given = ", ".join(map(leaf_text, call.inputs)) or "no array"
        place, which = call.place, f"this {type(call.layer).__name__}, which gets {given},"
    problems = getattr(error, "problems", ())
    if not problems:
        said = " ".join(str(error).split())[:300].rstrip(".")
        is_named = any(leaf.names for leaf in leaves_of(batch))
        fix = "" if is_named else "Name the batch: pz.nx.wrap(array, 'batch', 'seq')."
        problems = [Problem("", f"{type(error).__name__}: {said}", fix)]
    for own in problems:
        what = f"{which} cannot be called: {own.what}"
        yield Finding(place, what, own.fix, own.kind or "uncallable")


def leaf_text(leaf: Leaf) -> str:
    """An array by its axes: ``[batch=16, seq=8]``."""
    return f"[{write_axes(leaf.names, leaf.shape, None)}]"
