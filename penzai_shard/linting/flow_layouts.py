"""How what flows through a model is laid out, as far as inputs, parameters and constraints say so.

This follows logical axes by name from layer to layer. It is no propagation of a program: where two
mesh axes meet it does not decide, as it only has to know what was said.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from penzai_shard.layers import ConstrainActivations, GatherParameters
from penzai_shard.linting.model_flows import PASSERS, FlowingArray, LayerCall, ModelFlows
from penzai_shard.linting.pins import Pin, pins_of
from penzai_shard.linting.split_axes import axis_sizes
from penzai_shard.model_variables import is_parameter, value_of, variable_name
from penzai_shard.named_leaves import leaves_of
from penzai_shard.planning.plan import itemsize
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.surgery.tree_nodes import children_of, is_layer

Source: TypeAlias = Literal["batch", "constraint", "parameter"]


@dataclasses.dataclass(frozen=True)
class SplitAxis:
    """How a logical axis of an array is split, and what says so.

    Attributes:
        mesh_axes: The mesh axes.
        source: Whether the batch, a constraint layer or a parameter.
    """

    mesh_axes: tuple[str, ...]
    source: Source


Layout: TypeAlias = Mapping[LogicalAxis, SplitAxis]


@dataclasses.dataclass(frozen=True)
class HeldParameter:
    """A parameter that a layer itself holds.

    Attributes:
        label: Its label.
        sizes: Its lengths by logical axis, in one layer of a stack.
        nbytes: Its size in bytes.
    """

    label: str
    sizes: Mapping[LogicalAxis, int]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class LaidOutCall:
    """A call of a layer with the layouts of what flows through it.

    Attributes:
        call: The call.
        inputs: The layout of each array that goes in.
        outputs: The layout of each array that comes out.
        pinned: For a constraint layer, what each of its pins gives the arrays, before and after.
        parameters: The parameters that the layer itself holds.
        gathers: The layers around it that gather parameters, the outermost first.
    """

    call: LayerCall
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    pinned: tuple["PinnedArray", ...] = ()
    parameters: tuple[HeldParameter, ...] = ()
    gathers: tuple[GatherParameters, ...] = ()


@dataclasses.dataclass(frozen=True)
class PinnedArray:
    """An array that is pinned.

    Attributes:
        pin: By what.
        array: The array.
        before: Its layout before.
        after: Its layout after.
    """

    pin: Pin
    array: FlowingArray
    before: Layout
    after: Layout


def laid_out_calls(
    flows: ModelFlows,
    of_input: Callable[[int, FlowingArray], Mapping[LogicalAxis, tuple[str, ...]]],
    of_parameter: Callable[[str], Mapping[LogicalAxis, tuple[str, ...]]],
) -> tuple[LaidOutCall, ...]:
    """The calls of a model's layers, with the layouts of what flows.

    Args:
        flows: What flows through the model.
        of_input: How an input of the model is laid out, by its number.
        of_parameter: How a parameter is stored, by its label.

    Returns:
        One per call.
    """
    following = _Following(flows.calls, of_parameter)
    for number, array in enumerate(flows.calls[0].inputs if flows.calls else ()):
        split = of_input(number, array)
        following.layouts[array.value] = {
            name: SplitAxis(axes, "batch") for name, axes in split.items() if axes
        }
    return following.run()


class _Following:
    """Follows layouts through the calls of a model's layers."""

    def __init__(
        self,
        calls: Sequence[LayerCall],
        of_parameter: Callable[[str], Mapping[LogicalAxis, tuple[str, ...]]],
    ) -> None:
        self.layouts: dict[int, Layout] = {}
        self._calls = calls
        self._of_parameter = of_parameter
        self._found: dict[int, LaidOutCall] = {}
        # What flows inside of a call, for values that are new there, as in a loop.
        self._inside: dict[int, list[tuple[FlowingArray, Layout]]] = {}

    def run(self) -> tuple[LaidOutCall, ...]:
        running: list[int] = []
        for number, call in enumerate(self._calls):
            while running and running[-1] != call.around:
                self._end(running.pop())
            self._begin(number, call)
            running.append(number)
        while running:
            self._end(running.pop())
        return tuple(self._found[number] for number in range(len(self._calls)))

    def _begin(self, number: int, call: LayerCall) -> None:
        around = self._inside.get(-1 if call.around is None else call.around, [])
        inputs = [self._layout(array, around) for array in call.inputs]
        gathers = () if call.around is None else self._found[call.around].gathers
        if isinstance(call.layer, GatherParameters):
            gathers = (*gathers, call.layer)
        pinned = _pinned(call, "inputs", call.inputs, inputs)
        inside = list(zip(call.inputs, inputs, strict=True))
        for one in pinned:
            inside.insert(0, (one.array, one.after))
        self._inside[number] = inside
        self._found[number] = LaidOutCall(
            call, tuple(inputs), (), pinned, tuple(_parameters_of(call.layer)), gathers
        )

    def _layout(self, array: FlowingArray, around: Iterable[tuple[FlowingArray, Layout]]) -> Layout:
        if array.value in self.layouts:
            return self.layouts[array.value]
        same = (layout for other, layout in around if other.sizes == array.sizes)
        return next(same, {})

    def _end(self, number: int) -> None:
        found = self._found[number]
        call = found.call
        sources = self._inside[number]
        outputs = [
            self.layouts.get(array.value) or self._derived(array, sources, found.parameters)
            for array in call.outputs
        ]
        pinned: tuple[PinnedArray, ...] = ()
        if isinstance(call.layer, (*PASSERS, ConstrainActivations)):
            pinned = _pinned(call, "outputs", call.outputs, outputs)
            for one in pinned:
                outputs[call.outputs.index(one.array)] = one.after
        for array, layout in zip(call.outputs, outputs, strict=True):
            self.layouts[array.value] = layout
            if call.around is not None:
                # The newest first: what flows on is what a layer gave last.
                self._inside[call.around].insert(0, (array, layout))
        self._found[number] = dataclasses.replace(
            found, outputs=tuple(outputs), pinned=(*found.pinned, *pinned)
        )

    def _derived(
        self,
        array: FlowingArray,
        sources: Iterable[tuple[FlowingArray, Layout]],
        parameters: Iterable[HeldParameter],
    ) -> Layout:
        """What the layouts of arrays that it may have been made of say, by name."""
        found: dict[LogicalAxis, SplitAxis] = {}

        def add(sizes: Mapping[LogicalAxis, int], layout: Layout) -> None:
            taken = {axis for split in found.values() for axis in split.mesh_axes}
            for name, split in layout.items():
                fits = array.sizes.get(name) == sizes.get(name) and name not in found
                if fits and taken.isdisjoint(split.mesh_axes):
                    found[name] = split
                    taken |= set(split.mesh_axes)

        for source, layout in sources:
            add(source.sizes, layout)
        for parameter in parameters:
            stored = self._of_parameter(parameter.label)
            split = {name: SplitAxis(axes, "parameter") for name, axes in stored.items() if axes}
            add(parameter.sizes, split)
        return found


def _pinned(
    call: LayerCall, side: str, arrays: Sequence[FlowingArray], layouts: Sequence[Layout]
) -> tuple[PinnedArray, ...]:
    """What the pins of a layer on one side do to arrays, in turn."""
    found = []
    pins = [pin for pin in pins_of(call.layer) if pin.side == side]
    # Only the first argument is pinned, which may be a tree.
    for number, (array, before) in enumerate(zip(arrays, layouts, strict=True)):
        for pin in pins:
            split = pin.layout(array, number)
            after = {
                name: SplitAxis(axes, "constraint")
                for name, axes in split.items()
                if call.manual.isdisjoint(axes)
            }
            found.append(PinnedArray(pin, array, before, after))
            before = after
    return tuple(found)


def _parameters_of(layer: object) -> Iterable[HeldParameter]:
    """The parameters that a layer holds, and no layer in it."""
    waiting = [child for _, child in children_of(layer)]
    while waiting:
        node = waiting.pop()
        if is_parameter(node):
            sizes: dict[LogicalAxis, int] = {}
            nbytes = 0
            for leaf in leaves_of(value_of(node)):
                sizes |= axis_sizes(leaf.names, leaf.shape)
                nbytes += math.prod(leaf.shape) * itemsize(leaf.dtype)
            yield HeldParameter(variable_name(node, ""), sizes, nbytes)
        elif not is_layer(node):
            waiting += [child for _, child in children_of(node)]
