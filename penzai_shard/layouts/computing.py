"""Puts the rules of a layout in force for models that constrain their own activations.

Models of Penzai are edited. Those of Flax and Haliax have constraints in their code, which wait for
rules by name and a mesh.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from penzai_shard.layers.manual import manual_axes
from penzai_shard.layouts.edits import has_editable_layers
from penzai_shard.meshes import AnyMesh
from penzai_shard.rules import AxisRules


def compute_in_layout(
    loss_fn: Callable[..., Any],
    mesh: AnyMesh,
    find_rules: Callable[[Any], AxisRules],
    precision: str | None,
) -> Callable[..., Any]:
    """A loss function in which the constraints of a model are in force.

    Args:
        loss_fn: The loss function.
        mesh: The mesh, with Auto axes.
        find_rules: Gives the rules for activations for a model.
        precision: The dtype in which models compute that are not edited.
    """

    @functools.wraps(loss_fn)
    def compute_loss(*args: Any, model: Any, **inputs: Any) -> Any:
        if has_editable_layers(model):
            return loss_fn(*args, model=model, **inputs)
        with contextlib.ExitStack() as stack:
            for context in _find_contexts(mesh, find_rules(model)):
                stack.enter_context(context)
            return loss_fn(*args, model=model, **inputs)

    return compute_loss


def _find_contexts(mesh: AnyMesh, rules: AxisRules) -> list[Any]:
    """The contexts of the libraries that are there: rules by name, and the mesh."""
    manual = manual_axes()
    named = [rule for rule in rules.rules if isinstance(rule.logical_axis, str)]
    pairs: list[tuple[Any, Any]] = []
    for rule in named:
        free = tuple(axis for axis in rule.mesh_axes if axis not in manual)
        pairs.append((rule.logical_axis, free[0] if len(free) == 1 else free or None))
    contexts: list[Any] = []
    if not manual:
        abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        contexts.append(jax.sharding.use_abstract_mesh(abstract))
    if "flax.core.spmd" in sys.modules:
        contexts.append(sys.modules["flax.core.spmd"].logical_axis_rules(tuple(pairs)))
    if "haliax.partitioning" in sys.modules:
        mapping = {name: axes for name, axes in reversed(pairs) if axes is not None}
        contexts.append(sys.modules["haliax.partitioning"].axis_mapping(mapping))
    return contexts
