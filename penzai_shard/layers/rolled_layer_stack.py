"""Layer stacks that run as a real loop, so that compile time does not grow with depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.layers import variable_threading
from penzai_shard.layers.manual_region import as_varying, manual_axes, varying_axes
from penzai_shard.meshes import auto_context, onto_auto_twin
from penzai_shard.model_variables import thawed

SHARED = pz.nn.LayerStackVarBehavior.SHARED
PER_LAYER = pz.nn.LayerStackVarBehavior.PER_LAYER


class LayerStackError(ShardingError):
    """A stack cannot be run as a loop; every offender is reported."""


@pz.pytree_dataclass
class RolledLayerStack(pz.nn.LayerStack):
    """Takes the place of ``pz.nn.LayerStack``, and runs its layers as a loop.

    Penzai's own stack asks for a loop that is unrolled completely, so that the program, and the
    time to compile it, grow with depth. Here the layers are one body of a ``jax.lax.scan``. The
    parameters, their names and layout, the output, the gradients and the updates of state
    variables are those of Penzai's stack. A per-layer variable keeps the order of its logical
    axes, so that the model's structure is the same after a call.

    It is a ``pz.nn.LayerStack`` for selectors, and ``pz.nn.layerstack_axes_from_keypath`` knows
    it. State variables may live in the layers, where ``metadata["layerstack_axes"]`` says whether
    they are shared or per layer, and in the side inputs, where they are shared.

    Attributes:
        stacked_sublayers: One layer whose arrays have the extra logical axis ``stack_axis``
            wherever they differ between the layers.
        stack_axis: The logical axis of the layers.
        stack_axis_size: How many layers there are.
        unroll: How many layers one turn of the loop runs; more may run faster, and compiles
            longer.

    >>> layer = pz.nn.Sequential([pz.nn.ConstantRescale(by=2.0)])
    >>> stack = RolledLayerStack(layer, stack_axis="layers", stack_axis_size=3)
    >>> float(stack(1.0))
    8.0
    """

    stacked_sublayers: Any
    stack_axis: Hashable = dataclasses.field(metadata={"pytree_node": False})
    stack_axis_size: int = dataclasses.field(metadata={"pytree_node": False})
    unroll: int = dataclasses.field(default=1, metadata={"pytree_node": False})

    @classmethod
    def from_layer_stack(cls, stack: pz.nn.LayerStack, unroll: int = 1) -> RolledLayerStack:
        """The rolled form of Penzai's stack. Layers and variables are the same objects.

        Args:
            stack: The stack; one that is rolled already gets the new ``unroll``.
            unroll: How many layers one turn of the loop runs.

        Returns:
            The stack.
        """
        return cls(stack.stacked_sublayers, stack.stack_axis, stack.stack_axis_size, unroll)

    def to_layer_stack(self) -> pz.nn.LayerStack:
        """Penzai's form of the stack. Layers and variables are the same objects."""
        return pz.nn.LayerStack(self.stacked_sublayers, self.stack_axis, self.stack_axis_size)

    @classmethod
    def from_sublayer_builder(
        cls,
        builder: Callable[..., Any],
        stack_axis: Hashable,
        stack_axis_size: int,
        init_base_rng: jax.Array | None,
        builder_kwargs: dict[str, Any],
    ) -> RolledLayerStack:
        """Builds the layers, as ``pz.nn.LayerStack.from_sublayer_builder`` does.

        Args:
            builder: Builds one layer; takes a keyword argument ``init_base_rng``.
            stack_axis: The logical axis of the layers.
            stack_axis_size: How many layers there are.
            init_base_rng: Random key for the parameters, or None.
            builder_kwargs: Further keyword arguments of the builder.

        Returns:
            The stack.
        """
        return cls.from_layer_stack(
            pz.nn.LayerStack.from_sublayer_builder(
                builder, stack_axis, stack_axis_size, init_base_rng, builder_kwargs
            )
        )

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Runs the layers one after the other.

        Args:
            argument: The first layer's input. Every layer's output must be like its input, up to
                the order of the logical axes.
            **side_inputs: The side inputs of all layers.

        Returns:
            The last layer's output.

        Raises:
            LayerStackError: A state variable does not say how it belongs to the layers, or its
                value contradicts what it says; or a variable cannot be carried through a loop.
        """
        layers = pz.freeze_params(self.stacked_sublayers)
        side_inputs = pz.freeze_params(side_inputs)
        layers, layer_variables = pz.unbind_variables(layers)
        side_inputs, side_variables = pz.unbind_variables(side_inputs)
        variables = _Variables(self.stack_axis, layer_variables, side_variables, argument)

        with auto_context():
            layers, side_inputs, argument, shared, per_layer = onto_auto_twin(
                (layers, side_inputs, argument, variables.shared(), variables.per_layer())
            )
            stacked = (
                pz.select(layers)
                .at_instances_of(pz.nx.NamedArrayBase)
                .where(lambda array: self.stack_axis in array.named_shape)
            )
            slices = [_stack_axis_first(x, self.stack_axis) for x in stacked.get_sequence()]

            def run_layer(carried: Any, sliced: Any) -> Any:
                value, shared = carried
                layer_slices, per_layer = sliced
                mutable = list(map(thawed, (*shared, *per_layer)))
                layer, sides = pz.bind_variables(
                    (stacked.set_sequence(layer_slices), side_inputs), mutable
                )
                value = layer(value, **sides)
                variable_threading.check_no_variable(value, "RolledLayerStack")
                values = [variable.freeze() for variable in mutable]
                after = pz.nx.order_like((value, values[: len(shared)]), carried)
                return after, list(map(_ordered_as, values[len(shared) :], per_layer))

            carried = _varying_as_after(run_layer, (argument, shared), (slices, per_layer))
            (value, shared), per_layer = jax.lax.scan(
                run_layer,
                carried,
                (slices, per_layer),
                length=self.stack_axis_size,
                unroll=self.unroll,
            )
        variables.update(shared, per_layer)
        return value


def _stack_axis_first(array: Any, stack_axis: Hashable) -> Any:
    """The array with the stack axis as its leading dimension, without a name."""
    return array.untag_prefix(stack_axis).with_positional_prefix()


def _is_stacked(leaf: Any, stack_axis: Hashable) -> bool:
    return pz.nx.is_namedarray(leaf) and stack_axis in leaf.named_shape


def _ordered_as(value: Any, before: Any) -> Any:
    """The value with its logical axes in the order of a former value, if it is built like that."""
    structure: Any
    new_structure: Any
    former, structure = jax.tree_util.tree_flatten(before, is_leaf=pz.nx.is_namedarray)
    leaves, new_structure = jax.tree_util.tree_flatten(value, is_leaf=pz.nx.is_namedarray)
    alike = structure == new_structure and all(
        pz.nx.is_namedarray(old) == pz.nx.is_namedarray(new)
        and (not pz.nx.is_namedarray(old) or set(old.named_shape) == set(new.named_shape))
        for old, new in zip(former, leaves, strict=True)
    )
    if alike:
        return pz.nx.order_like(value, before)
    return new_structure.unflatten(
        [x.with_positional_prefix() if pz.nx.is_namedarray(x) else x for x in leaves]
    )


class _Variables:
    """The state variables of a stack, and whether each is shared by the layers or per layer."""

    def __init__(
        self,
        stack_axis: Hashable,
        layer_variables: Sequence[Any],
        side_variables: Sequence[Any],
        argument: Any,
    ) -> None:
        self._stack_axis = stack_axis
        self._shared: list[Any] = []
        self._per_layer: list[Any] = []
        problems = [
            f"{_named(variable)}: the argument of a layer stack cannot hold variables, because "
            "every layer's output must be like it. Pass it as a side input."
            for variable in jax.tree_util.tree_leaves(argument)
            if variable_threading.is_variable(variable)
        ]
        problems += [
            f"{_named(variable)}: only pz.Parameter and pz.StateVariable can be in a layer stack."
            for variable in (*layer_variables, *side_variables)
            if not isinstance(variable, pz.StateVariable)
        ]
        by_label: dict[Any, Any] = {}
        for variable in side_variables:
            by_label[variable.label] = variable
            self._shared.append(variable)
        for variable in layer_variables:
            if not isinstance(variable, pz.StateVariable):
                continue
            problem = self._add_layer_variable(variable, by_label)
            problems += [f"{_named(variable)}: {problem}"] if problem else []
        raise_all(LayerStackError, "this layer stack cannot run as a loop:", problems)

    def _add_layer_variable(self, variable: Any, by_label: dict[Any, Any]) -> str:
        axis = self._stack_axis
        behavior = variable.metadata.get("layerstack_axes", {}).get(axis)
        known = by_label.get(variable.label)
        stacked = [
            _is_stacked(leaf, axis)
            for leaf in jax.tree_util.tree_leaves(variable.value, is_leaf=pz.nx.is_namedarray)
        ]
        if behavior is SHARED:
            if any(stacked):
                return (
                    f"it is shared by the layers, and its value has logical axis {axis!r}. "
                    "Declare it LayerStackVarBehavior.PER_LAYER, or drop the axis."
                )
            if known is variable:
                return ""
            if known is not None:
                return "another variable of this label is a side input. Use one object in both."
            self._shared.append(variable)
        elif behavior is PER_LAYER:
            if known is not None:
                return "it is per layer and cannot be a side input too. Give one another label."
            if not all(stacked):
                return (
                    f"it is per layer, and its value lacks logical axis {axis!r} in some array. "
                    "Declare it LayerStackVarBehavior.SHARED, or add the axis."
                )
            self._per_layer.append(variable)
        else:
            return (
                f"it does not say how it belongs to the layers of axis {axis!r}. Give it "
                f'metadata={{"layerstack_axes": {{{axis!r}: pz.nn.LayerStackVarBehavior.SHARED}}}}'
                ", or PER_LAYER."
            )
        by_label[variable.label] = variable
        return ""

    def shared(self) -> list[Any]:
        """The values that all layers see."""
        return [variable.freeze() for variable in self._shared]

    def per_layer(self) -> list[Any]:
        """The values of the layers, the stack axis leading."""
        return [
            dataclasses.replace(
                variable.freeze(),
                value=jax.tree_util.tree_map(
                    lambda leaf: _stack_axis_first(leaf, self._stack_axis),
                    variable.value,
                    is_leaf=pz.nx.is_namedarray,
                ),
            )
            for variable in self._per_layer
        ]

    def update(self, shared: Sequence[Any], per_layer: Sequence[Any]) -> None:
        """Gives the variables their values after the last layer."""
        for variable, after in zip(self._shared, shared, strict=True):
            variable.value = after.value
        for variable, after in zip(self._per_layer, per_layer, strict=True):
            named = jax.tree_util.tree_map(
                lambda leaf: (leaf if pz.nx.is_namedarray(leaf) else pz.nx.wrap(leaf)).tag_prefix(
                    self._stack_axis
                ),
                after.value,
                is_leaf=pz.nx.is_namedarray,
            )
            variable.value = _ordered_as(named, variable.value)


def _named(variable: Any) -> str:
    return f"{type(variable).__name__} {getattr(variable, 'label', '')!r}"


def _varying_as_after(run_layer: Any, carried: Any, sliced: Any) -> Any:
    """What is carried, typed as varying along the mesh axes that it varies along after a turn.

    Inside ``jax.shard_map`` a loop wants the same type before and after each turn.
    """
    if not manual_axes():
        return carried

    def turn(carried: Any, sliced: Any) -> Any:
        after, _ = run_layer(carried, jax.tree_util.tree_map(lambda x: x[0], sliced))
        return after

    structure: Any
    while True:
        after = jax.eval_shape(turn, carried, sliced)
        leaves, structure = jax.tree_util.tree_flatten(carried)
        wanted = [varying_axes(leaf) for leaf in structure.flatten_up_to(after)]
        if all(axes <= varying_axes(leaf) for axes, leaf in zip(wanted, leaves, strict=True)):
            return carried
        carried = structure.unflatten(map(as_varying, leaves, wanted))
