"""Runs a layer per device, its parameters gathered where they are used.

The compiler partitions a program as a whole, and may move activations where moving parameters would
be cheaper. Here it is written down: every device holds its part of the batch, gathers each
parameter for as long as it is used, and scatters the gradient.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from penzai import pz

from penzai_shard.arrays.structure import Structure
from penzai_shard.errors import check_arguments
from penzai_shard.layers.manual import manual_axes
from penzai_shard.layers.pure_call import PureCall
from penzai_shard.layers.region import run_per_device
from penzai_shard.layers.wrapper import Call, WrapperLayer
from penzai_shard.meshes import AnyMesh, auto_twin
from penzai_shard.planning import arguments
from penzai_shard.rules import AxisRules

_STATIC = {"pytree_node": False}
_KINDS = {"min_size": int, "per_device": bool, "keep_split": tuple, "assume_independent": tuple}


@pz.pytree_dataclass
class ShardMapped(WrapperLayer):
    """Wraps a layer so that it runs per device under ``jax.shard_map``, as FSDP does.

    Output, gradients, parameter names and assignments of variables stay those of the layer. What
    changes is who moves what: each parameter is gathered where it is used, over the mesh axes that
    ``parameter_rules`` split it over, and its gradient is summed and scattered over them. The
    argument, side inputs, state variables and the output are split by ``activation_rules``; arrays
    without names are copies on every device.

    The layer must compute the elements of a split logical axis independently of each other, as a
    transformer block does with those of a batch. This is checked before anything runs, operation by
    operation: what is not known to be independent is refused, functions with their own backward
    rule (``jax.custom_vjp``) too. ``assume_independent`` names operations that you vouch for.

    A layer that moves data itself (``jax.lax.psum``, ``axis_index``, ...) is written for one
    device's part: ``per_device=True`` runs it as it is, checked by JAX (``check_vma``). Nothing
    says then what the whole layer would compute.

    Every ``pz.RandomStream`` is folded with the device's position along the mesh axes over which
    activations are split: devices draw different numbers for different parts, and the same for
    the same part. Constraint layers inside leave out the mesh axes, all of which are taken over.
    Inside another ``ShardMapped``, or under ``jax.shard_map``, the body runs bare.

    Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 3; Zhao et al. 2023, "PyTorch
    FSDP" (arXiv:2304.11277); ``jax.shard_map``.

    Attributes:
        body: The layer.
        mesh: The mesh. Arrays of an Explicit mesh come out on its Auto twin.
        parameter_rules: Which logical axis of a parameter goes to which mesh axis, in any form that
            ``make_plan`` takes.
        activation_rules: The same for everything else.
        min_size: Parameters with fewer elements are copies on every device, which is cheaper than
            gathering them.
        keep_split: Logical axes over which parameters stay split inside.
        per_device: Whether the layer is written for one device's part.
        assume_independent: Names of operations, or of functions under ``jax.jit``, that treat
            elements independently.

    Raises:
        RuleTypeError, MeshError: An option cannot be read, or a rule names no axis of the mesh.
        PlanError: A length does not divide; raised by the call, as the next.
        ManualRegionError: The layer mixes elements of a split axis, moves data itself, or has an
            output that is split otherwise than ``activation_rules`` say.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> layer = ShardMapped(pz.nn.Softmax("embed"), mesh, {}, {"batch": "data"})
    >>> layer(pz.nx.ones({"batch": 16, "embed": 4})).data_array.sharding.spec
    P('data',)
    """

    body: Any
    mesh: AnyMesh = dataclasses.field(metadata=_STATIC)
    parameter_rules: AxisRules = dataclasses.field(metadata=_STATIC)
    activation_rules: AxisRules = dataclasses.field(metadata=_STATIC)
    min_size: int = dataclasses.field(default=0, metadata=_STATIC)
    keep_split: tuple[Hashable, ...] = dataclasses.field(default=(), metadata=_STATIC)
    per_device: bool = dataclasses.field(default=False, metadata=_STATIC)
    assume_independent: tuple[str, ...] = dataclasses.field(default=(), metadata=_STATIC)

    def __post_init__(self) -> None:
        for key in ("parameter_rules", "activation_rules"):
            self.__dict__[key] = arguments.read("ShardMapped", self.mesh, getattr(self, key)).rules
        # A text in place of a tuple of names would be taken for its letters.
        checks = {}
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            checks[name] = value, isinstance(value, kind), f"a {kind.__name__}, such as {kind()}"
        check_arguments("ShardMapped", checks)

    def _transform(self, call: Call, structure: Structure) -> Call:
        # What is around has taken over the mesh axes, and the body gets a part already.
        if manual_axes():
            return call
        assert isinstance(call, PureCall)
        # The body is in the call.
        region = dataclasses.replace(self, body=None, mesh=auto_twin(self.mesh))

        def run(values: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
            structure, arrays = run_per_device(region, call, list(values))
            tree = structure.fill_alike(arrays)
            return tree["output"], tree["assigned"]

        return run
