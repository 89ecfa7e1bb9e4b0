"""Lays parameters out in one way while they are stored and in another while they are used."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from penzai import pz

from penzai_shard.arrays.structure import Named, Structure, leaves_of
from penzai_shard.layers.constraints import pin_by_name
from penzai_shard.layers.remat import GATHERED
from penzai_shard.layers.wrapper import Call, WrapperLayer
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments


@pz.pytree_dataclass
class GatherParameters(WrapperLayer):
    """Wraps a layer so that its parameters are gathered when it runs.

    Output, gradients, parameter names and assignments of variables stay those of the layer; so do
    the layouts in which parameters and their gradients are stored. What changes is that the
    compiler is told to move parameters to the activations, never activations to the parameters. It
    may keep a gathered parameter from the forward to the backward pass: with ``Checkpointed``
    around this layer, not in it, the policy ``"all_but_gathered"`` has it gathered again.

    Gradients are summed in the layout of use, and then go where the parameters are stored. Where
    the batch is split over all mesh axes, ``gradients_as_used=False`` lets the compiler scatter
    while it sums, which sends less over the slow connections of hybrid sharding. Where a mesh axis
    is idle, it would use that freedom to move partial gradients about.

    Sources: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 3; Xu et al. 2020, "Automatic
    Cross-Replica Sharding of Weight Update" (arXiv:2004.13336).

    Attributes:
        body: The layer.
        mesh: The mesh.
        rules: How parameters lie while they are used, in any form that ``make_plan`` takes; what no
            rule names is whole on every device.
        gradients_as_used: Whether gradients are summed in that layout too.
        stored: How parameters are stored, if that is to be said again here. An ``InPrecision``
            layer around this one casts them on the way; the compiler may otherwise gather them
            before the cast, in twice the bytes.

    Raises:
        RuleTypeError, MeshError: As ``make_plan``.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> linear = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 8}, {"b": 3})
    >>> layer = GatherParameters(pzs.place(linear, mesh, {"a": "data"}), mesh, {})
    >>> layer(pz.nx.ones({"a": 8})).named_shape
    {'b': 3}
    """

    body: Any
    mesh: AnyMesh = dataclasses.field(metadata={"pytree_node": False})
    rules: Any = dataclasses.field(metadata={"pytree_node": False})
    gradients_as_used: bool = dataclasses.field(default=True, metadata={"pytree_node": False})
    stored: Any = dataclasses.field(default=None, metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        self.__dict__["rules"] = _request(self.mesh, self.rules).rules
        if self.stored is not None:
            self.__dict__["stored"] = _request(self.mesh, self.stored).rules

    def _transform(self, call: Call, structure: Structure) -> Call:
        structure.check_paths()

        def call_gathered(values: Any) -> tuple[Any, dict[int, Any]]:
            leaves = leaves_of(structure.fill_alike(values))
            # Other libraries do not tell parameters from constants.
            tells = any(leaf.role == "parameter" for leaf in leaves)
            own = [x for x in leaves if (x.role == "parameter" if tells else x.path[:4] == "body")]
            named = {leaf.path: Named(leaf.value, leaf.names) for leaf in own}
            gathered = gather(named, self.mesh, self.rules, self.gradients_as_used, self.stored)
            return call([gathered.get(leaf.path, leaf.value) for leaf in leaves])

        return call_gathered


def gather(
    parameters: Mapping[str, Named],
    mesh: AnyMesh,
    rules: Any,
    gradients_as_used: bool = True,
    stored: Any = None,
) -> Any:
    """The values of parameters in the layout of their use, by path.

    Args:
        parameters: The parameters by path.
        mesh: As for ``GatherParameters``, and so the others.
        rules: How they are used.
        gradients_as_used: Whether gradients are summed in that layout too.
        stored: How they are stored, if that is to be said again.
    """

    def pin(values: Any, rules: Any, **more: Any) -> Any:
        tree = {path: Named(values[path], own.names) for path, own in parameters.items()}
        return pin_by_name(tree, _request(mesh, rules, **more))

    values = {path: own.value for path, own in parameters.items()}
    if stored is not None:
        values = pin(values, stored, on_indivisible="replicate")
    if gradients_as_used:
        return checkpoint_name(pin(values, rules), GATHERED)
    use = jax.custom_jvp(lambda values: pin(values, rules))
    # By `pin`: as an operation of its own a gathered parameter would be kept by policies that
    # know it only under the name that it gets here.
    use.defjvp(lambda values, tangents: (pin(values[0], rules), tangents[0]))
    return checkpoint_name(use(values), GATHERED)


def _request(mesh: AnyMesh, rules: Any, **more: Any) -> arguments.Request:
    return arguments.read("GatherParameters", mesh, rules, on_unnamed="replicate", **more)
