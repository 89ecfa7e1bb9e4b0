"""Where gradients are kept and updates computed: as the optimizer keeps what belongs to them.

Left to itself the compiler chooses how a gradient is laid out, and may keep it whole on every
device. A gradient is therefore brought to the layout of its parameter's moments in the optimizer's
state, and the update is computed there. Under FSDP that is the parameter's own layout, so that
gradients are reduce-scattered (Zhao et al. 2023, arXiv:2304.11277). Where the parameters are
whole and the moments are split, each device updates its part and the parameters are gathered:
stages 1 and 2 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from penzai_shard.padded_arrays import pinned
from penzai_shard.partition_specs import largest_part
from penzai_shard.training.flat_state import StateForm
from penzai_shard.training.train_state import TrainState, peek


class _Undeclared:
    """Stands for an array of which no layout is known; unlike None it is a leaf."""


@dataclasses.dataclass(frozen=True)
class UpdateLayout:
    """The layouts of the trainable parameters in the loss and in the update.

    Attributes:
        loss: Of each trainable parameter's arrays, the layout that the parameter has in the loss.
            Arrays that JAX may lay out are None.
        update: The layout of its gradient and its update.
        mesh: The mesh that the state is on; None if it is on none, or that is not known.
        uneven: The lengths that are split unevenly in the loss, and the mesh; see
            ``uneven_lengths``.
    """

    loss: Mapping[str, list[NamedSharding | None]]
    update: Mapping[str, list[NamedSharding | None]]
    mesh: Mesh | None = None
    uneven: tuple[frozenset[int], Any] = (frozenset(), None)

    @classmethod
    def unknown(cls) -> "UpdateLayout":
        """The layout that leaves everything to JAX."""
        return cls({}, {})

    @classmethod
    def of(
        cls, state: TrainState, form: StateForm, shardings: list[Sharding | None] | None
    ) -> "UpdateLayout":
        """Reads the layouts off those of a train state.

        Args:
            state: The state, concrete or traced.
            form: Its form.
            shardings: Those of the arrays that a step replaces, None where JAX may choose; or
                None, for all.
        """
        trainable = form.variables.trainable_names
        if shardings is None:
            return cls.unknown()
        known = [_Undeclared() if sharding is None else sharding for sharding in shardings]
        fields = form.fields_of(form.merged(known, [_Undeclared()] * form.changes.count(False)))
        trees = {
            name: jax.tree.unflatten(fields[name].treedef, fields[name].leaves)
            for name in ("params", "opt_state")
        }
        params = {name: jax.tree.leaves(peek(state, "params")[name]) for name in trainable}
        loss = {
            name: list(map(_on_mesh, jax.tree.leaves(trees["params"][name]))) for name in params
        }
        found: dict[str, list[NamedSharding | None]] = {}
        statistics = _by_parameter(peek(state, "opt_state"), trainable)
        layouts = _by_parameter(trees["opt_state"], trainable)
        for (name, arrays), (_, candidates) in zip(statistics, layouts, strict=True):
            if [x.shape for x in arrays] != [x.shape for x in params[name]]:
                continue
            moment = list(map(_on_mesh, candidates))
            if name not in found or _part(arrays, moment) < _part(arrays, found[name]):
                found[name] = moment
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
        return cls(loss, {name: found.get(name, own) for name, own in loss.items()}, mesh)

    def for_update(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters or gradients, by name, as they are laid out in the update."""
        return _laid_out(tree, self.update)

    def for_loss(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters by name, as they are laid out in the loss."""
        return _laid_out(tree, self.loss)


def _by_parameter(opt_state: Any, trainable: frozenset[str]) -> list[tuple[str, list[Any]]]:
    """What an optimizer keeps for each parameter, and the arrays of it: moments, say."""

    def is_by_name(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and node.keys() <= trainable

    return [
        (name, jax.tree.leaves(statistic))
        for node in jax.tree.leaves(opt_state, is_leaf=is_by_name)
        if is_by_name(node)
        for name, statistic in node.items()
    ]


def _on_mesh(sharding: Any) -> NamedSharding | None:
    """A layout that can be asked of a part of a computation; None if there is nothing to ask."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    # Whatever is kept in another memory is computed in that of the devices.
    return NamedSharding(sharding.mesh, sharding.spec)


def _part(arrays: list[Any], shardings: list[NamedSharding | None]) -> int:
    """How many elements of some arrays are on one device."""
    return sum(
        math.prod(
            array.shape
            if sharding is None
            else largest_part(sharding.spec, array.shape, sharding.mesh.shape)
        )
        for array, sharding in zip(arrays, shardings, strict=True)
    )


def _laid_out(
    tree: Mapping[str, Any], layouts: Mapping[str, list[NamedSharding | None]]
) -> dict[str, Any]:
    laid_out = {}
    for name, value in tree.items():
        leaves, treedef = jax.tree.flatten(value)
        wanted = layouts.get(name) or [None] * len(leaves)
        with jax.named_scope(name):
            placed = [
                leaf if sharding is None else pinned(leaf, sharding)
                for leaf, sharding in zip(leaves, wanted, strict=True)
            ]
        laid_out[name] = jax.tree.unflatten(treedef, placed)
    return laid_out
