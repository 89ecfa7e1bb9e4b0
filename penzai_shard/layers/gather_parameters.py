"""Parameters laid out in one way while they are stored and in another while they are used."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, raise_all, warn_caller
from penzai_shard.layers import variable_threading
from penzai_shard.layers.checkpointed import Checkpointed
from penzai_shard.layers.constrain_sharding import constrained_by_name
from penzai_shard.layers.remat_policies import named_as_gathered
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.meshes import AnyMesh, onto_auto_twin
from penzai_shard.model_variables import (
    is_parameter,
    thawed,
    value_of,
    variable_name,
    with_value,
)
from penzai_shard.model_variables.first_api_effects import effects_as_variables
from penzai_shard.padded_arrays import without_padding
from penzai_shard.planning import PlanRequest
from penzai_shard.rule_kinds import OnIndivisible
from penzai_shard.tree_paths import path_text


@pz.pytree_dataclass
class GatherParameters(WrapperLayer):
    """Wraps a layer so that its parameters are gathered when it runs.

    Output, gradients, parameter names and the updates of state variables stay those of the
    wrapped layer; so do the parameters' own layouts, and those of their gradients. What changes
    is that the compiler is told to move parameters to the activations, never activations to the
    parameters. It may keep a gathered parameter from the forward to the backward pass. Around
    this layer ``Checkpointed`` with the policy ``"all_but_gathered"`` has it gathered again.

    Gradients are summed in the layout of use, and then go where the parameters are stored. Where
    the batch is split over all mesh axes, ``gradients_as_used=False`` lets the compiler scatter
    while it sums, which sends less over the slow connections of hybrid sharding. Where a mesh axis
    is idle, it would use that freedom to move partial gradients about.

    Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 3; Xu et al. 2020,
    "Automatic Cross-Replica Sharding of Weight Update" (arXiv:2004.13336).

    Warns:
        ShardingWarning: The layer is ``Checkpointed``: what is gathered is then kept all the same.

    Attributes:
        body: The layer.
        mesh: The mesh. An Explicit mesh means its Auto twin.
        rules: How parameters are laid out while they are used, in any form that ``AxisRules``
            reads: what no rule names is whole on every device.
        gradients_as_used: Whether gradients are summed in that layout too.
        stored: How parameters are stored, if that is to be said again here. An ``InPrecision``
            layer around this one casts them on the way; left to itself, the compiler may then
            gather them before the cast, in twice the bytes.
        on_indivisible: As for ``ConstrainShardingByName``.

    >>> from penzai_shard.meshes import make_mesh
    >>> from penzai_shard.placement import place
    >>> mesh = make_mesh({"data": 8})
    >>> linear = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 8}, {"b": 3})
    >>> layer = GatherParameters(place(linear, mesh, {"a": "data"}), mesh, {})
    >>> layer(pz.nx.ones({"a": 8})).named_shape
    {'b': 3}
    """

    body: Any
    mesh: AnyMesh = dataclasses.field(metadata={"pytree_node": False})
    rules: AxisRules | Mapping[Any, Any] | Sequence[Any] | None = dataclasses.field(
        metadata={"pytree_node": False}
    )
    gradients_as_used: bool = dataclasses.field(default=True, metadata={"pytree_node": False})
    stored: AxisRules | Mapping[Any, Any] | Sequence[Any] | None = dataclasses.field(
        default=None, metadata={"pytree_node": False}
    )
    on_indivisible: OnIndivisible = dataclasses.field(
        default="error", metadata={"pytree_node": False}
    )

    def __post_init__(self) -> None:
        """Refuses rules that do not fit the mesh where they are written."""
        for rules in (self.rules, () if self.stored is None else self.stored):
            PlanRequest.read(
                "GatherParameters",
                self.mesh,
                AxisRules.of(rules),
                on_indivisible=self.on_indivisible,
            )

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        if isinstance(self.body, Checkpointed):
            warn_caller(
                [
                    "Checkpointed is inside of GatherParameters, so that what was gathered is kept "
                    "for the backward pass. Rematerialise before the layer gathers: "
                    "rematerialise_blocks(...) + layout.recipe(model, mesh), or "
                    "Layout(..., rematerialise=...)."
                ]
            )
        problems: list[str] = []

        def gathered(key_path: Any, node: Any) -> Any:
            if not is_parameter(node):
                return node
            try:
                return self._gathered(node)
            except PlanError as error:
                name = variable_name(node, path_text(key_path))
                problems.extend(each.replace("the array", name, 1) for each in error.problems)
                return node

        body = jax.tree_util.tree_map_with_path(gathered, self.body, is_leaf=is_parameter)
        raise_all(PlanError, "no valid layout for some parameters that are gathered:", problems)
        unbound, variables = pz.unbind_variables(
            (effects_as_variables(body), argument, side_inputs)
        )
        values, unbound = onto_auto_twin(([variable.freeze() for variable in variables], unbound))
        temporary = list(map(thawed, values))
        body, argument, side_inputs = pz.bind_variables(unbound, temporary)
        output, changed = variable_threading.call_with(
            temporary, body, argument, side_inputs, "GatherParameters"
        )
        variable_threading.assign(variables, changed)
        return output

    def _gathered(self, parameter: Any) -> Any:
        """A parameter, frozen, in the layout in which it is used."""
        used: Any = _used if self.gradients_as_used else _used_with_any_gradient
        value = without_padding(value_of(parameter))
        if self.stored is not None:
            value = constrained_by_name(
                value,
                self.mesh,
                self.stored,
                on_indivisible="pad" if self.on_indivisible == "pad" else "replicate",
                on_unnamed="replicate",
            )
        value = used(value, self.mesh, AxisRules.of(self.rules), self.on_indivisible)
        return with_value(parameter, jax.tree_util.tree_map(named_as_gathered, value))


def _used(value: Any, mesh: AnyMesh, rules: AxisRules, on_indivisible: OnIndivisible) -> Any:
    """A parameter's value in the layout of its use, and its gradient in the same."""
    return constrained_by_name(
        value, mesh, rules, on_indivisible=on_indivisible, on_unnamed="replicate"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _used_with_any_gradient(
    value: Any, mesh: AnyMesh, rules: AxisRules, on_indivisible: OnIndivisible
) -> Any:
    """A parameter's value in the layout of its use, and its gradient in any."""
    return _used(value, mesh, rules, on_indivisible)


@_used_with_any_gradient.defjvp
def _tangent(
    mesh: AnyMesh,
    rules: AxisRules,
    on_indivisible: OnIndivisible,
    primals: Any,
    tangents: Any,
) -> Any:
    # As an operation of its own a gathered parameter would be kept by policies that know only the
    # name of the parameter below.
    return _used(primals[0], mesh, rules, on_indivisible), tangents[0]
