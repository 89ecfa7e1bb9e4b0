"""A layer whose inputs and outputs are pinned to layouts.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), for activations that are gathered before a layer and scattered after it.
"""

import dataclasses
from typing import Any

from jax.sharding import Mesh
from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, RuleTypeError
from penzai_shard.layers.constrain_sharding import ConstrainShardingByName
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.meshes import AnyMesh
from penzai_shard.rule_kinds import OnIndivisible, check_option


@pz.pytree_dataclass
class ConstrainActivations(WrapperLayer):
    """Wraps a layer so that what flows into it and out of it is pinned to layouts.

    Output, gradients, parameter names and state stay those of the wrapped layer. Each layout pins
    the gradient that flows back through it too. With two layouts on a side the compiler moves the
    activations from one to the other there, and nowhere inside the layer: it gathers before a
    layer that needs the whole sequence, and reduces and scatters after it.

    Attributes:
        body: The layer.
        mesh: The mesh. An Explicit mesh means its Auto twin.
        inputs: The layouts that the argument is brought to, one after the other: rules in any form
            that ``AxisRules`` reads. Side inputs are left alone.
        outputs: The layouts that the output is brought to, one after the other.
        on_indivisible: As for ``ConstrainShardingByName``.

    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> between, inside = {"batch": "data", "seq": "model"}, {"batch": "data"}
    >>> layer = ConstrainActivations(
    ...     pz.nn.Identity(), mesh, inputs=(between, inside), outputs=(inside, between)
    ... )
    >>> layer(pz.nx.ones({"batch": 8, "seq": 4})).data_array.sharding.spec
    P('data', 'model')
    """

    body: Any
    mesh: AnyMesh = dataclasses.field(metadata={"pytree_node": False})
    inputs: tuple[Any, ...] = dataclasses.field(default=(), metadata={"pytree_node": False})
    outputs: tuple[Any, ...] = dataclasses.field(default=(), metadata={"pytree_node": False})
    on_indivisible: OnIndivisible = dataclasses.field(
        default="error", metadata={"pytree_node": False}
    )

    def __post_init__(self) -> None:
        """Reads the rules where they are written, and not where the model runs."""
        check_option("on_indivisible", self.on_indivisible)
        self.__dict__.update(
            inputs=_read("inputs", self.inputs, self.mesh),
            outputs=_read("outputs", self.outputs, self.mesh),
        )

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        for rules in self.inputs:
            argument = self._pinned(argument, rules, "into")
        output = self.body(argument, **side_inputs)
        for rules in self.outputs:
            output = self._pinned(output, rules, "out of")
        return output

    def _pinned(self, value: Any, rules: Any, way: str) -> Any:
        try:
            layer = ConstrainShardingByName(self.mesh, rules, on_indivisible=self.on_indivisible)
            return layer(value)
        except PlanError as error:
            layer = self.body
            while isinstance(layer, WrapperLayer):
                layer = layer.body
            headline = f"no valid layout for what flows {way} the {type(layer).__name__}:"
            raise PlanError(headline, error.problems) from error

    def meshes(self) -> list[Mesh]:
        """The mesh, if it has devices."""
        return [self.mesh] if isinstance(self.mesh, Mesh) else []


def _read(what: str, given: Any, mesh: AnyMesh) -> tuple[AxisRules, ...]:
    if not isinstance(given, tuple | list):
        raise RuleTypeError(
            f"{what} of ConstrainActivations is a tuple of tables of rules, one for each layout in "
            f"turn, not {given!r}. Write {what}=({given!r},)."
        )
    read = tuple(map(AxisRules.of, given))
    for rules in read:
        rules.check_mesh(mesh)
    return read


def laid_out(
    layer: Any,
    mesh: AnyMesh,
    inputs: tuple[Any, ...] = (),
    outputs: tuple[Any, ...] = (),
    parameters: Any = None,
    gradients_as_used: bool = True,
    stored: Any = None,
    on_indivisible: OnIndivisible = "error",
) -> WrapperLayer:
    """A layer with its activations pinned, and its parameters gathered: one wrapper of an edit.

    Args:
        layer: The layer.
        mesh: The mesh.
        inputs: As for ``ConstrainActivations``.
        outputs: As for ``ConstrainActivations``.
        parameters: The rules of ``GatherParameters``; None uses parameters as they are stored.
        gradients_as_used: As for ``GatherParameters``.
        stored: As for ``GatherParameters``.
        on_indivisible: As for both.

    Returns:
        The layer, wrapped.
    """
    if parameters is not None:
        layer = GatherParameters(layer, mesh, parameters, gradients_as_used, stored, on_indivisible)
    return ConstrainActivations(layer, mesh, inputs, outputs, on_indivisible)
