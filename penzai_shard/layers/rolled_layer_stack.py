"""Layer stacks that run as a real loop, so that compile time does not grow with depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.layers import variable_threading
from penzai_shard.layers.layer_loops import run_in_turn
from penzai_shard.layers.manual_region import as_varying, varying_axes
from penzai_shard.layers.remat_policies import (
    StackPolicyLike,
    check_host_memory,
    resolve_stack_policy,
)
from penzai_shard.library_apis.jax_api import manual_mesh_axes
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
        policy: What is kept between forward and backward pass: False for everything, True or
            ``"carries"`` for the input of each layer alone, ``"nested"`` for that of each group of
            about the square root of the number of layers, ``"inputs"``, ``"offload_carries"``, a
            name that ``Checkpointed`` takes, or a ``LayerStackPolicy``, which says how much memory
            and computation each takes.

    >>> layer = pz.nn.Sequential([pz.nn.ConstantRescale(by=2.0)])
    >>> stack = RolledLayerStack(layer, stack_axis="layers", stack_axis_size=3)
    >>> float(stack(1.0))
    8.0
    """

    stacked_sublayers: Any
    stack_axis: Hashable = dataclasses.field(metadata={"pytree_node": False})
    stack_axis_size: int = dataclasses.field(metadata={"pytree_node": False})
    unroll: int = dataclasses.field(default=1, metadata={"pytree_node": False})
    policy: StackPolicyLike = dataclasses.field(default=False, metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        """Refuses an unknown policy where it is written, not where the model runs."""
        resolve_stack_policy(self.policy)

    @classmethod
    def from_layer_stack(
        cls, stack: pz.nn.LayerStack, unroll: int = 1, policy: StackPolicyLike = False
    ) -> RolledLayerStack:
        """The rolled form of Penzai's stack. Layers and variables are the same objects.

        Args:
            stack: The stack; one that is rolled already gets the new ``unroll`` and ``policy``.
            unroll: How many layers one turn of the loop runs.
            policy: What is kept between forward and backward pass, as for the class.

        Returns:
            The stack.

        Raises:
            RuleTypeError: The policy cannot be read.
        """
        return cls(stack.stacked_sublayers, stack.stack_axis, stack.stack_axis_size, unroll, policy)

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
            ShardingError: The policy offloads, and the backend has no host memory to offload to.
        """
        policy = resolve_stack_policy(self.policy)
        if policy is not None and policy.offloads:
            check_host_memory(f"RolledLayerStack(policy={self.policy!r})")
        side_inputs = pz.freeze_params(side_inputs)
        layers, layer_variables = pz.unbind_variables(pz.freeze_params(self.stacked_sublayers))
        side_inputs, side_variables = pz.unbind_variables(side_inputs)
        shared_variables, layer_variables = _shared_and_per_layer(
            self.stack_axis, layer_variables, side_variables, argument
        )
        shared = [variable.freeze() for variable in shared_variables]
        per_layer = self._with_stack_axis_first([variable.freeze() for variable in layer_variables])

        with auto_context():
            layers, side_inputs, argument, shared, per_layer = onto_auto_twin(
                (layers, side_inputs, argument, shared, per_layer)
            )
            stacked = (
                pz.select(layers)
                .at_instances_of(pz.nx.NamedArrayBase)
                .where(lambda array: self.stack_axis in array.named_shape)
            )
            slices = self._with_stack_axis_first(list(stacked.get_sequence()))

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
            (value, shared), per_layer = run_in_turn(
                run_layer,
                carried,
                (slices, per_layer),
                length=self.stack_axis_size,
                unroll=self.unroll,
                policy=policy,
                name=str(self.stack_axis),
            )
        for variable, after in zip(shared_variables, shared, strict=True):
            variable.value = after.value
        for variable, after in zip(layer_variables, per_layer, strict=True):
            stacked_again = _map_arrays(self._with_stack_axis, after.value)
            variable.value = _ordered_as(stacked_again, variable.value)
        return value

    def _with_stack_axis(self, array: Any) -> Any:
        named = array if pz.nx.is_namedarray(array) else pz.nx.wrap(array)
        return named.tag_prefix(self.stack_axis)

    def _with_stack_axis_first(self, tree: Any) -> Any:
        """The tree, the stack axis of each array as its leading dimension, without a name."""
        return _map_arrays(
            lambda array: array.untag_prefix(self.stack_axis).with_positional_prefix(), tree
        )


def _map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map(function, tree, is_leaf=pz.nx.is_namedarray)


def _ordered_as(value: Any, before: Any) -> Any:
    """The value with the logical axes of each array in the order of a former value's."""
    structure: Any
    former_structure: Any
    leaves, structure = jax.tree_util.tree_flatten(value, is_leaf=pz.nx.is_namedarray)
    former, former_structure = jax.tree_util.tree_flatten(before, is_leaf=pz.nx.is_namedarray)
    if structure != former_structure:
        former = [None] * len(leaves)  # Built differently: there is no order to keep.
    return structure.unflatten(map(_array_ordered_as, leaves, former))


def _array_ordered_as(array: Any, before: Any) -> Any:
    if not pz.nx.is_namedarray(array):
        return array
    if pz.nx.is_namedarray(before) and set(array.named_shape) == set(before.named_shape):
        return array.order_like(before)
    return array.with_positional_prefix()


def _shared_and_per_layer(
    stack_axis: Hashable,
    layer_variables: Sequence[Any],
    side_variables: Sequence[Any],
    argument: Any,
) -> tuple[list[Any], list[Any]]:
    """The state variables of a call that all layers share, and those that each layer has.

    Raises:
        LayerStackError: A variable cannot be carried through a loop, or contradicts itself.
    """
    problems = [
        f"{_title(variable)}: the argument of a layer stack cannot hold variables, because "
        "every layer's output must be like it. Pass it as a side input."
        for variable in jax.tree_util.tree_leaves(argument)
        if variable_threading.is_variable(variable)
    ]
    problems += [
        f"{_title(variable)}: only pz.Parameter and pz.StateVariable can be in a layer stack."
        for variable in (*layer_variables, *side_variables)
        if not isinstance(variable, pz.StateVariable)
    ]
    inputs = {v.label: v for v in side_variables if isinstance(v, pz.StateVariable)}
    by_behavior: dict[Any, list[Any]] = {SHARED: [*inputs.values()], PER_LAYER: []}
    for variable in layer_variables:
        if isinstance(variable, pz.StateVariable):
            behavior = variable.metadata.get("layerstack_axes", {}).get(stack_axis)
            same_label = inputs.get(variable.label)
            problem = _contradiction(variable, behavior, stack_axis, same_label)
            if problem is not None:
                problems.append(f"{_title(variable)}: {problem}")
            elif variable is not same_label:
                by_behavior[behavior].append(variable)
    raise_all(LayerStackError, "this layer stack cannot run as a loop:", problems)
    return by_behavior[SHARED], by_behavior[PER_LAYER]


def _contradiction(
    variable: Any, behavior: Any, stack_axis: Hashable, same_label: Any
) -> str | None:
    """What is wrong with a state variable of the layers; ``same_label`` is a side input."""
    stacked = [
        pz.nx.is_namedarray(leaf) and stack_axis in leaf.named_shape
        for leaf in jax.tree_util.tree_leaves(variable.value, is_leaf=pz.nx.is_namedarray)
    ]
    if behavior is SHARED:
        if any(stacked):
            return (
                f"it is shared by the layers, and its value has logical axis {stack_axis!r}. "
                "Declare it LayerStackVarBehavior.PER_LAYER, or drop the axis."
            )
        if same_label is not None and same_label is not variable:
            return "another variable of this label is a side input. Use one object in both."
        return None
    if behavior is PER_LAYER:
        if same_label is not None:
            return "it is per layer and cannot be a side input too. Give one another label."
        if not all(stacked):
            return (
                f"it is per layer, and its value lacks logical axis {stack_axis!r} in some array. "
                "Declare it LayerStackVarBehavior.SHARED, or add the axis."
            )
        return None
    return (
        f"it does not say how it belongs to the layers of axis {stack_axis!r}. Give it "
        f'metadata={{"layerstack_axes": {{{stack_axis!r}: pz.nn.LayerStackVarBehavior.SHARED}}}}'
        ", or PER_LAYER."
    )


def _title(variable: Any) -> str:
    return f"{type(variable).__name__} {getattr(variable, 'label', '')!r}"


def _varying_as_after(run_layer: Any, carried: Any, sliced: Any) -> Any:
    """What is carried, typed as varying along the mesh axes that it varies along after a turn.

    Inside ``jax.shard_map`` a loop wants the same type before and after each turn.
    """
    if not manual_mesh_axes():
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
