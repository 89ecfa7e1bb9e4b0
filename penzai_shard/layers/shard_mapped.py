"""Running a layer per device, its parameters gathered when they are used.

The compiler partitions a program as a whole, and may find a layout that moves activations where
moving parameters would be cheaper. Here it is written down: every device holds its part of the
batch, gathers each parameter for as long as it is used, and scatters the gradient.

Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 3; Zhao et al. 2023, "PyTorch
FSDP" (arXiv:2304.11277); ``jax.shard_map``.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from penzai import pz

from penzai_shard.array_kinds import is_concrete
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, RuleTypeError, ShardingError
from penzai_shard.layers import variable_threading
from penzai_shard.layers.manual_region import check_manual_axes, manual_axes, mesh_axis_names
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree, take_apart
from penzai_shard.layers.shard_map_regions.region_call import RegionCall, indices_by_text
from penzai_shard.layers.shard_map_regions.region_plan import ManualRegionError, Region
from penzai_shard.layers.unfit_calls import UNFIT_CALL
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.meshes import AnyMesh, auto_context, auto_twin, mesh_text, onto_auto_twin
from penzai_shard.named_leaves import leaves_of

__all__ = ["ManualRegionError", "ShardMapped"]

Rules = AxisRules | Mapping[Any, Any] | Sequence[Any] | None
"""Any form that ``AxisRules`` reads."""

_STATIC = {"pytree_node": False}


@pz.pytree_dataclass
class ShardMapped(WrapperLayer):
    """Wraps a layer so that it runs per device under ``jax.shard_map``, as FSDP does.

    Every parameter is gathered where it is used, over the mesh axes that ``parameter_rules``
    split it over, and its gradient is scattered back as a sum over them. The argument, the side
    inputs and the output are split by name by ``activation_rules``; arrays without names are
    copies on every device. Output and gradients are those of the wrapped layer. What changes is
    who moves what between devices.

    The layer must compute the elements of a split logical axis independently of each other, as a
    transformer block does with those of a batch. This is checked before anything runs: the
    layer's program is followed operation by operation, once with the global lengths and once with
    those of a part. Only operations that are known to treat the elements of every split dimension
    independently, and not to depend on their number or position, are let through; so are loops,
    branches, compiled functions, rematerialisation and custom derivatives made of them. Anything
    else is refused, with the operation, its layers and its source line, if a result depends on
    it. ``assume_independent`` names operations that you vouch for.

    A layer that moves data between the devices itself (``jax.lax.psum``, ``ppermute``,
    ``axis_index``, ...) is written for one device's part. ``per_device=True`` runs it as it is:
    nothing is checked, and nothing says what the whole layer would compute. Of its output, a
    dimension that ``activation_rules`` split is a part, unless JAX knows that the devices hold the
    same. With ``keep_split`` parameters stay split in it, for tensor parallelism by hand.

    ``pz.RandomStream`` objects are folded with the device's position along the mesh axes that
    activations are split over: every device draws other numbers for its part of the batch than
    the others do, and the same as those that hold the same part. State variables may live in the
    layer, in the argument and in the side inputs; their values are split by ``activation_rules``
    too. Constraint layers inside leave out the mesh axes that are taken over by it. Inside another
    ``ShardMapped`` layer, or anything else under ``jax.shard_map``, this one steps aside: the
    parameters were gathered outside, and the compiler lays out what is left.

    Arrays of an Explicit mesh are relabelled onto its Auto twin, so outputs are on the Auto twin.

    Attributes:
        body: The layer.
        mesh: The mesh. An Explicit mesh means its Auto twin.
        parameter_rules: Which logical axis of a parameter goes to which mesh axis, in any form
            that ``AxisRules`` reads.
        activation_rules: The same for the argument, the side inputs, the output, and the state.
        manual_axes: The mesh axes that are taken over, all by default; the layout along the
            others is left to the compiler.
        only_where_split: Whether, of ``manual_axes``, only those are taken over that activations
            are split over in a call, with those that a rule of ``parameter_rules`` names together
            with one of them; all, if activations are split over none. A mesh axis for tensor
            parallelism is then left to the compiler.
        min_size: Parameters with fewer elements than this are copies on every device, which is
            cheaper than gathering them; their gradients are summed.
        keep_split: Logical axes over which parameters stay split inside, instead of being
            gathered.
        per_device: Whether the layer is written for one device's part, and runs unchecked.
        assume_independent: Names of operations (as errors give them, or of functions under
            ``jax.jit``) that treat the elements of a split logical axis independently, whatever
            they look like.

    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 8})
    >>> layer = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 4})
    >>> sharded = ShardMapped(layer, mesh, {"embedding": "data"}, {"batch": "data"})
    >>> output = sharded(pz.nx.ones({"batch": 16, "embedding": 8}))
    >>> output.data_array.sharding.shard_shape((16, 4))
    (2, 4)
    >>> ShardMapped(pz.nn.Softmax("batch"), mesh, {}, {"batch": "data"})(output)
    Traceback (most recent call last):
        ...
    penzai_shard.layers.shard_map_regions.region_plan.ManualRegionError: the layer does not treat
    the elements that are on different devices independently (split: 'batch' (16) over mesh axis
    'data' (8)):
      'reduce_max' of Softmax (basic_ops.py:71): it reduces logical axis 'batch', ...
    """

    body: Any
    mesh: AnyMesh = dataclasses.field(metadata=_STATIC)
    parameter_rules: Rules = dataclasses.field(metadata=_STATIC)
    activation_rules: Rules = dataclasses.field(metadata=_STATIC)
    manual_axes: str | tuple[str, ...] | None = dataclasses.field(default=None, metadata=_STATIC)
    min_size: int = dataclasses.field(default=0, metadata=_STATIC)
    keep_split: str | tuple[str, ...] = dataclasses.field(default=(), metadata=_STATIC)
    per_device: bool = dataclasses.field(default=False, metadata=_STATIC)
    assume_independent: str | tuple[str, ...] = dataclasses.field(default=(), metadata=_STATIC)
    only_where_split: bool = dataclasses.field(default=False, metadata=_STATIC)

    def __post_init__(self) -> None:
        """Refuses what cannot be read where it is written, not where the model runs."""
        region = self._region()
        for rules in (region.parameter_rules, region.activation_rules):
            rules.check_mesh(region.mesh)

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Runs the layer per device.

        Args:
            argument: The layer's input.
            **side_inputs: The layer's side inputs.

        Returns:
            The layer's output.

        Raises:
            MeshError: A rule or ``manual_axes`` names a mesh axis that the mesh does not have.
            PlanError: A length does not divide; all offenders are reported.
            ManualRegionError: The layer does not treat the elements of a split logical axis
                independently, or moves data between devices without ``per_device``; all offenders
                are reported.
            RuleTypeError: An option is of another kind, or a parameter or input has no value.
            ValueError: The layer returned a mutable variable.
        """
        region = self._region()
        if manual_axes() or not region.manual:
            return self.body(argument, **side_inputs)
        given = {"layer": self.body, "argument": argument, **side_inputs}
        (body, argument, side_inputs), variables = pz.unbind_variables(
            (self.body, argument, side_inputs)
        )
        variable_threading.check_distinct_slots(variables)
        # Parameters come first, as they are split by other rules than states.
        variables = sorted(variables, key=lambda variable: not isinstance(variable, pz.Parameter))
        count = sum(isinstance(variable, pz.Parameter) for variable in variables)
        frozen = [variable.freeze() for variable in variables]
        given_to_body = {"argument": argument, "side_inputs": side_inputs, "states": frozen[count:]}
        inputs, arrays = take_apart(((frozen[:count], body), given_to_body))
        try:
            with auto_context():
                tree, arrays = _shard_mapped(RegionCall(region, inputs), arrays)
        except UNFIT_CALL as error:
            problem = _unfit(error, region, given)
            if problem is None:
                raise
            raise problem from None
        after = tree.put_together(arrays)
        if after["changed"]:
            indices = indices_by_text(variables)
            changed = {indices[text]: content for text, content in after["changed"].items()}
            variable_threading.assign(variables, changed)
        return after["output"]

    def _region(self) -> Region:
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise MeshError(
                f"ShardMapped takes a jax.sharding.Mesh, not {self.mesh!r}. Make one: "
                "make_mesh({'data': 8})."
            )
        kinds = {"min_size": int, "per_device": bool, "only_where_split": bool}
        for option, kind in kinds.items():
            if not isinstance(value := getattr(self, option), kind):
                raise RuleTypeError(f"{option} must be {kind.__name__}, not {value!r}.")
        mesh = auto_twin(self.mesh)
        wanted = taken_over(self)
        check_manual_axes(wanted, mesh)
        return Region(
            mesh=mesh,
            parameter_rules=AxisRules.of(self.parameter_rules),
            activation_rules=AxisRules.of(self.activation_rules),
            manual=tuple(name for name in mesh.axis_names if name in wanted),
            min_size=self.min_size,
            keep_split=_names("keep_split", self.keep_split),
            per_device=bool(self.per_device),
            assume_independent=_names("assume_independent", self.assume_independent),
            only_where_split=self.only_where_split,
        )


def taken_over(layer: ShardMapped) -> tuple[str, ...]:
    """The mesh axes that a layer takes over from the compiler."""
    if layer.manual_axes is None:
        return tuple(layer.mesh.axis_names)
    return mesh_axis_names("manual_axes", layer.manual_axes)


def _names(option: str, names: Any) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else names
    logical = option == "keep_split"  # Any value may name a logical axis.
    if not isinstance(found, Sequence) or not (logical or all(isinstance(n, str) for n in found)):
        raise RuleTypeError(
            f"{option} must be a name or a sequence of names, not {names!r}. Write for instance "
            f"{option}=('{_EXAMPLES[option]}',)."
        )
    return tuple(found)


_EXAMPLES = {"keep_split": "neurons", "assume_independent": "rev"}


def _unfit(error: Exception, region: Region, given: dict[str, Any]) -> ShardingError | None:
    """What is wrong with the arrays of a call that failed; None if it failed otherwise."""
    leaves = leaves_of(given)
    if any(isinstance(leaf.array, jax.ShapeDtypeStruct) for leaf in leaves):
        return RuleTypeError(
            "ShardMapped was called with abstract arrays, which have a shape and no value:",
            [
                f"{leaf.path}: build it with sharded_init, fill it with restore_params or "
                "with_params, or trace the call: jax.eval_shape(model, x)."
                for leaf in leaves
                if isinstance(leaf.array, jax.ShapeDtypeStruct)
            ],
        )
    elsewhere = [leaf for leaf in leaves if _is_elsewhere(leaf.array, region.mesh)]
    if "incompatible" not in str(error) or not elsewhere:
        return None
    return MeshError(
        f"ShardMapped was called with arrays that are not on its mesh, {_text(region.mesh)}:",
        [
            f"{leaf.path}: is on {_text(getattr(leaf.array.sharding, 'mesh', leaf.array))}. Place "
            "it there: place(x, mesh, rules)."
            for leaf in elsewhere
        ],
    )


def _is_elsewhere(array: Any, mesh: AnyMesh) -> bool:
    if not is_concrete(array):
        return False
    sharding = array.sharding
    return array.committed and (
        sharding.device_set != set(mesh.devices.flat) or getattr(sharding, "mesh", mesh) != mesh
    )


def _text(place: Any) -> str:
    if isinstance(place, jax.Array):
        devices: Any = place.sharding.device_set
        ids = sorted(device.id for device in devices)
        return f"device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"
    return f"a mesh ({mesh_text(place)}) of {math.prod(place.shape.values())} devices"


@functools.partial(jax.jit, static_argnums=0)
def _shard_mapped(call: RegionCall, arrays: list[Any]) -> tuple[BoundaryTree, list[Any]]:
    # Compiled, and remembered by how the model is built: a region that is not compiled would be
    # traced anew at every call, and cannot leave mesh axes to the compiler.
    with auto_context():
        return call.run(onto_auto_twin(arrays))
