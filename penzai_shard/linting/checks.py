"""All checks, in the order in which their findings are looked for."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from penzai_shard.linting.array_checks import other_problems, unfit_axes
from penzai_shard.linting.batch_checks import (
    batches_that_do_not_fit,
    uncallable_models,
    whole_batches,
)
from penzai_shard.linting.conflict_checks import conflicts
from penzai_shard.linting.constraint_checks import (
    constraints_in_a_row,
    constraints_of_nothing,
    constraints_of_other_meshes,
    constraints_that_split_nothing,
)
from penzai_shard.linting.findings import Finding
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.region_checks import regions_of_nothing
from penzai_shard.linting.rule_checks import (
    layout_problems,
    names_of_mesh_axes,
    unknown_mesh_axes,
    unused_rules,
)
from penzai_shard.linting.unreadable_rules import unreadable_rules
from penzai_shard.linting.waste_checks import idle_mesh_axes, under_sharded

Check: TypeAlias = Callable[[LintSubject], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    unreadable_rules,
    unknown_mesh_axes,
    layout_problems,
    unfit_axes,
    other_problems,
    names_of_mesh_axes,
    unused_rules,
    constraints_of_other_meshes,
    uncallable_models,
    batches_that_do_not_fit,
    whole_batches,
    constraints_that_split_nothing,
    constraints_of_nothing,
    constraints_in_a_row,
    regions_of_nothing,
    conflicts,
    under_sharded,
    idle_mesh_axes,
)
"""What ``lint`` looks for; a check gives findings, and changes that may mend each."""
