"""A layout's rules and mesh in the forms in which other libraries have them in force."""

import contextlib
from typing import Any

import jax
from jax.sharding import Mesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.library_apis.jax_api import manual_mesh_axes
from penzai_shard.meshes import AnyMesh
from penzai_shard.rule_kinds import IdentityRule, LogicalAxis, NameRule


def rules_as_pairs(
    rules: AxisRules, mesh: AnyMesh, library: str, constrains_by: str
) -> tuple[tuple[str, Any], ...]:
    """Rules as pairs of a logical axis and one mesh axis, several, or None, in their order.

    Mesh axes that a surrounding ``jax.shard_map`` has taken over are left out, as there every
    device has its own part along them.

    Args:
        rules: The rules for activations.
        mesh: The mesh.
        library: The library's name, for messages.
        constrains_by: What the library calls its rules, for messages.

    Raises:
        RuleTypeError: Some rules are not for names, or a name is not a text.

    >>> rules_as_pairs(AxisRules.of({"a": ("x", "y")}), jax.make_mesh((8,), ("x",)), "F", "rules")
    (('a', ('x', 'y')),)
    """
    manual = manual_mesh_axes()
    pairs: list[tuple[str, Any]] = []
    problems = []
    for rule in rules.rules:
        named: list[tuple[LogicalAxis, tuple[str, ...]]] = []
        if isinstance(rule, NameRule):
            named = [(rule.logical_axis, rule.mesh_axes)]
        elif isinstance(rule, IdentityRule):
            named = [(name, (name,)) for name in mesh.shape if name not in rules.logical_axes]
        else:
            problems.append(f"{rule}: {library} has only rules for names. Leave it out of compute.")
        for name, mesh_axes in named:
            if isinstance(name, str):
                free = tuple(axis for axis in mesh_axes if axis not in manual)
                pairs.append((name, free[0] if len(free) == 1 else free or None))
            elif name != mesh_axes:
                problems.append(
                    f"{rule}: {library} has only texts as names. Leave it out of compute."
                )
    raise_all(
        RuleTypeError,
        f"this model constrains its activations by {constrains_by}, which cannot say all "
        "that the layout's compute says:",
        problems,
    )
    return tuple(pairs)


def in_mesh(mesh: AnyMesh) -> contextlib.AbstractContextManager[Any]:
    """The mesh as the one of the context, where there is none that ``jax.shard_map`` has made."""
    if manual_mesh_axes():
        return contextlib.nullcontext()
    try:
        jax.sharding.get_mesh()
    except ValueError:  # While JAX traces a program, which has no devices yet.
        abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        return jax.sharding.use_abstract_mesh(abstract)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext()
