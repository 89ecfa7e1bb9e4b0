"""Flax's own context of logical axis rules, which linen's constraints and NNX' variables follow."""

import contextlib
import sys
from collections.abc import Iterator

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.readers.rules_in_force import in_mesh, rules_as_pairs


@contextlib.contextmanager
def flax_rules_in_force(rules: AxisRules, mesh: AnyMesh) -> Iterator[None]:
    """Rules for activations as Flax's logical axis rules, and the mesh that they are for.

    Args:
        rules: The rules.
        mesh: The mesh.

    Raises:
        RuleTypeError: Flax cannot follow the rules, or others are in force already.
    """
    spmd = sys.modules["flax.core.spmd"]
    pairs = rules_as_pairs(rules, mesh, "Flax", "Flax's logical axis rules")
    given = spmd.get_logical_axis_rules()
    if given and tuple(given) != pairs:
        raise RuleTypeError(
            f"nn.logical_axis_rules is in force with other rules, {tuple(given)}, than those "
            f"by which this layout computes, {pairs}. Leave it out around the step, or give "
            "the layout these rules: compute=rules."
        )
    with spmd.logical_axis_rules(pairs), in_mesh(mesh):
        yield
