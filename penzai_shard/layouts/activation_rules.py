"""Puts the rules of a layout in force for models that constrain their own activations.

Models of Penzai are edited. Those of Flax and Haliax have constraints in their code, which wait for
rules by name and for a mesh. Source: ``flax.linen.logical_axis_rules``, ``haliax.axis_mapping``.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from penzai_shard.layers.manual import manual_axes
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning.planner import warn_of_near_names
from penzai_shard.rules import AxisRules, Rule


class _Listener(str):
    """A logical axis that equals none. Linen compares it with each that a model names.

    Nothing else tells which these are: no array has them, and a trace does not keep them.

    Attributes:
        heard: The logical axes that it was compared with.
    """

    heard: set[Any]
    __hash__ = str.__hash__

    def __eq__(self, name: object) -> bool:
        self.heard.add(name)
        return False


def compute_by_rules(
    loss_fn: Callable[..., Any], mesh: AnyMesh, rules: Sequence[Rule], known: Iterable[Any]
) -> Callable[..., Any]:
    """A loss function in which the constraints of a model are in force.

    Args:
        loss_fn: The loss function.
        mesh: The mesh, with Auto axes.
        rules: The rules for activations, of which those count that name an axis by a text.
        known: The logical axes that rules may name although the model's own code does not.

    Warns:
        ShardingWarning: A rule names nearly what is known, or what a model of linen asks for.
    """

    @functools.wraps(loss_fn)
    def compute_loss(*args: Any, **inputs: Any) -> Any:
        listener = _Listener()
        listener.heard = {*known, "batch", "seq"}
        with contextlib.ExitStack() as stack:
            for context in _find_contexts(mesh, rules, listener):
                stack.enter_context(context)
            result = loss_fn(*args, **inputs)
        warn_of_near_names("compute", AxisRules(rules), listener.heard)
        return result

    return compute_loss


def _find_contexts(mesh: AnyMesh, rules: Sequence[Rule], listener: _Listener) -> list[Any]:
    """The contexts of the libraries that are imported: their rules by name, and the mesh."""
    flax, haliax = (sys.modules.get(name) for name in ("flax.core.spmd", "haliax.partitioning"))
    if flax is None and haliax is None:
        return []
    # Inside of jax.shard_map each device has its own part along the axes that this took over.
    manual = manual_axes()
    pairs: list[tuple[str, Any]] = []
    for rule in rules:
        free = tuple(axis for axis in rule.mesh_axes if axis not in manual)
        if isinstance(rule.logical_axis, str):
            pairs.append((rule.logical_axis, free[0] if len(free) == 1 else free or None))
    contexts: list[Any] = [] if manual else [jax.sharding.use_abstract_mesh(mesh.abstract_mesh)]
    if flax is not None:
        contexts.append(flax.logical_axis_rules((*pairs, (listener, None))))
        if linen := sys.modules.get("flax.linen"):
            contexts.append(linen.intercept_methods(_call_without_mesh))
    if haliax is not None:
        # It has one entry for a name, and a name without an entry is whole.
        mapping = {name: axes for name, axes in reversed(pairs) if axes is not None}
        contexts.append(haliax.axis_mapping(mapping))
    return contexts


def _call_without_mesh(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Calls a method of a module of linen, that of a ``DenseGeneral`` without a mesh.

    It opens the box of a flat kernel, which has fewer dimensions than names, and the box would pin
    it (https://github.com/google/flax/issues/3676).
    """
    is_general = isinstance(context.module, sys.modules["flax.linen"].DenseGeneral)
    empty = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty) if is_general else contextlib.nullcontext():
        return call(*args, **kwargs)
