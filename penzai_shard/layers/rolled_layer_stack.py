"""Runs the layers of a stack as a loop, so that compile time does not grow with depth.

A loop cannot run backward without the input of each turn; a policy says what else is kept, and
nested loops keep that of one turn in about the square root of their number.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from penzai import pz

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.errors import LayerStackError, Problems
from penzai_shard.layers import remat
from penzai_shard.meshes import auto_context, on_auto_twin

_SHARED = pz.nn.LayerStackVarBehavior.SHARED
_PER_LAYER = pz.nn.LayerStackVarBehavior.PER_LAYER
# Besides those of ``Checkpointed``. What is in a layer is then computed again, all of it.
_OWN_POLICIES = ("carries", "nested")
ROLL_POLICIES = (*_OWN_POLICIES, *remat.POLICIES)
# A layer: of what is carried and its slices, what is carried on and its own results.
_RunLayer: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@pz.pytree_dataclass
class RolledLayerStack(pz.nn.LayerStack):  # type: ignore[misc]
    """Takes the place of ``pz.nn.LayerStack``, and runs its layers as a loop.

    Parameters, their names and layout, output, gradients and assignments of variables stay those of
    Penzai's stack, as which selectors know it. What changes is the program: Penzai unrolls its loop
    completely, so that program and compile time grow with depth; here the layers are one body of a
    ``jax.lax.scan``. A variable that each layer has keeps the order of its logical axes.

    Attributes:
        stacked_sublayers: One layer, whose arrays have the logical axis ``stack_axis`` wherever
            they differ between the layers.
        stack_axis: The logical axis of the layers.
        stack_axis_size: How many layers there are.
        unroll: How many layers one turn of the loop runs: more may run faster, and compile longer.
        policy: What is kept between forward and backward pass. With n layers, a layer's input of C
            bytes and I bytes that it computes inside:

            * False or ``"everything"``: all, n * (C + I);
            * ``"carries"``: the input of each layer, n * C + I; each layer runs forward twice;
            * ``"nested"``: the input of each group of about sqrt(n) layers, the divisor of n that
              is nearest to it, 2 * sqrt(n) * C + I; each layer runs forward three times. With a
              prime n it is ``"carries"``;
            * what ``Checkpointed`` takes, for what is kept inside of each layer.

    Raises:
        RuleTypeError: There is no policy of that name.

    >>> layer = pz.nn.Sequential([pz.nn.ConstantRescale(by=2.0)])
    >>> float(RolledLayerStack(layer, stack_axis="layers", stack_axis_size=3)(1.0))
    8.0
    """

    stacked_sublayers: Any
    stack_axis: Hashable = dataclasses.field(metadata={"pytree_node": False})
    stack_axis_size: int = dataclasses.field(metadata={"pytree_node": False})
    unroll: int = dataclasses.field(default=1, metadata={"pytree_node": False})
    policy: remat.Policy | bool = dataclasses.field(default=False, metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        if self.policy is not False:
            remat.check_policy("RolledLayerStack", self.policy, ROLL_POLICIES)

    @classmethod
    def from_layer_stack(
        cls, stack: pz.nn.LayerStack, unroll: int = 1, policy: remat.Policy | bool = False
    ) -> "RolledLayerStack":
        """The rolled form of a stack, with the same layers and variables.

        Args:
            stack: The stack; one that is rolled already gets the new options.
            unroll: As for the class.
            policy: As for the class.

        Raises:
            RuleTypeError: As for the layer itself.
        """
        return cls(stack.stacked_sublayers, stack.stack_axis, stack.stack_axis_size, unroll, policy)

    @classmethod
    def from_sublayer_builder(cls, *args: Any, **options: Any) -> "RolledLayerStack":
        """Builds the layers.

        Args:
            *args: What ``pz.nn.LayerStack.from_sublayer_builder`` takes.
            **options: The same, by keyword.
        """
        # That of Penzai gives its own class, whatever the class it is called on.
        return cls.from_layer_stack(pz.nn.LayerStack.from_sublayer_builder(*args, **options))

    def to_layer_stack(self) -> pz.nn.LayerStack:
        """Penzai's form of the stack, with the same layers and variables."""
        return pz.nn.LayerStack(self.stacked_sublayers, self.stack_axis, self.stack_axis_size)

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Runs the layers one after the other.

        Args:
            argument: The first layer's input. Every layer's output must have its form, up to the
                order of the logical axes, as in Penzai's stack.
            **side_inputs: The side inputs of all layers; variables in them are shared.

        Returns:
            The last layer's output.

        Raises:
            ShardingError: Arrays are deleted, or shapes.
            LayerStackError: A variable cannot go through a loop, or contradicts its metadata.
            TypeError, ValueError: A layer gives back something of another form, as JAX says.
        """
        run_inputs({"body": self, "argument": argument, **side_inputs}, type(self).__name__)
        # Take apart what all layers share, and what each of them gets a slice of.
        layers, layer_variables = pz.unbind_variables(pz.freeze_params(self.stacked_sublayers))
        side_inputs, side_variables = pz.unbind_variables(pz.freeze_params(side_inputs))
        variables = self._sort_variables(layer_variables, side_variables)
        shared, per_layer = ([variable.freeze() for variable in kind] for kind in variables)
        with auto_context():
            parts = on_auto_twin((layers, side_inputs, argument, shared, per_layer))
            layers, side_inputs, argument, shared, per_layer = parts
            named = pz.select(layers).at_instances_of(pz.nx.NamedArrayBase)
            stacked = named.where(self._is_stacked)
            slices = _map_arrays(self._slice_first, (list(stacked.get_sequence()), per_layer))

            def run_layer(carry: Any, own: Any) -> tuple[Any, Any]:
                arrays, per_layer = own
                value, shared = carry
                live = [variable.unfreeze_as_copy() for variable in (*shared, *per_layer)]
                pair = stacked.set_sequence(arrays), side_inputs
                layer, sides = pz.bind_variables(pair, live)
                value = layer(value, **sides)
                after = [variable.freeze() for variable in live]
                result = pz.nx.order_like((value, after[: len(shared)]), carry)
                return result, _map_arrays(_with_positional_prefix, after[len(shared) :])

            # Run them, and give the variables what they hold now.
            (value, shared), per_layer = self._run_loop(run_layer, (argument, shared), slices)
        for variable, after in zip(variables[0], shared, strict=True):
            variable.value = after.value
        for variable, after in zip(variables[1], per_layer, strict=True):
            stacks = _map_arrays(lambda array: array.tag_prefix(self.stack_axis), after.value)
            # A structure that is the same after a call compiles nothing anew.
            is_alike = _axes_of_arrays(stacks) == _axes_of_arrays(variable.value)
            variable.value = pz.nx.order_like(stacks, variable.value) if is_alike else stacks
        return value

    # Arrays with the stack axis

    def _is_stacked(self, array: Any) -> bool:
        return pz.nx.is_namedarray(array) and self.stack_axis in array.named_shape

    def _slice_first(self, array: Any) -> Any:
        return array.untag_prefix(self.stack_axis).with_positional_prefix()

    def _sort_variables(
        self, layer_variables: Sequence[Any], side_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The variables of a call that all layers share, and those that each layer has."""
        axis, problems = self.stack_axis, Problems("this layer stack cannot run as a loop:")
        shared, per_layer = {variable.label: variable for variable in side_variables}, []
        for variable in layer_variables:
            behavior = variable.metadata.get("layerstack_axes", {}).get(axis)
            is_shared, same_label = behavior is _SHARED, shared.get(variable.label)
            label = str(variable.label)
            arrays = jax.tree.leaves(variable.value, is_leaf=pz.nx.is_namedarray)
            have_axis = [*map(self._is_stacked, arrays)]
            # A variable of each layer may begin empty.
            fits = all(have_axis) if behavior is _PER_LAYER else is_shared and not any(have_axis)
            if not fits:
                verb, wanted = ("has", _PER_LAYER) if any(have_axis) else ("lacks", _SHARED)
                what = f"for the axis {axis!r} it says {behavior}, and its value {verb} that axis"
                fix = f"Write metadata={{'layerstack_axes': {{{axis!r}: pz.nn.{wanted}}}}}."
                problems.add(label, what, fix)
            elif same_label is not None and not (is_shared and same_label is variable):
                # One of them would get the other's value.
                problems.add(label, "a side input has the same label", "Give one another label.")
            elif is_shared:
                shared[variable.label] = variable
            else:
                per_layer.append(variable)
        problems.raise_if_any(LayerStackError)
        return [*shared.values()], per_layer

    def _run_loop(self, run_layer: _RunLayer, carry: Any, slices: Any) -> Any:
        """What ``jax.lax.scan`` gives, with what the policy keeps for the backward pass."""

        def run_turns(carry: Any, slices: Any, length: int) -> Any:
            run, unroll = run_layer, min(self.unroll, length)
            if self.policy not in (False, "everything"):
                policy: Any = None if self.policy in _OWN_POLICIES else self.policy
                keeps = remat.find_policy(policy)
                # In a loop the compiler cannot find what the forward pass has computed, and use it.
                run = jax.checkpoint(run, policy=keeps, prevent_cse=length == unroll)
            return jax.lax.scan(run, carry, slices, length=length, unroll=unroll)

        count = self.stack_axis_size
        # Groups of one size, as layers that are left over would copy the parameters of the stack.
        divisors = (size for size in range(1, count + 1) if count % size == 0)
        size = min(divisors, key=lambda size: abs(size - math.sqrt(count)))
        if self.policy != "nested" or size in (1, count):
            return run_turns(carry, slices, count)
        groups = count // size
        run_group = jax.checkpoint(run_turns, prevent_cse=False, static_argnums=2)
        in_groups = jax.tree.map(lambda x: x.reshape(groups, size, *x.shape[1:]), slices)
        carry, results = jax.lax.scan(
            lambda carry, slices: run_group(carry, slices, size), carry, in_groups, length=groups
        )
        return carry, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), results)


def _map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=pz.nx.is_namedarray)


def _with_positional_prefix(array: Any) -> Any:
    named = array if pz.nx.is_namedarray(array) else pz.nx.wrap(array)
    return named.with_positional_prefix()


def _axes_of_arrays(tree: Any) -> Any:
    return _map_arrays(lambda array: frozenset(array.named_shape), tree)
