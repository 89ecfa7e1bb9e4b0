"""What in a model, its rules and its batches is probably a mistake or a waste.

A ``LintSubject`` is what is looked at: model, mesh, rules, batch, and the plan as far as there is
one. Each check is a function of it that gives findings, with changes that may mend each. Of these,
the first is chosen that mends it without bringing a new finding, which is tried out.
"""

from penzai_shard.linting.findings import Finding
from penzai_shard.linting.lint_report import LintReport
from penzai_shard.linting.linting import lint

__all__ = ["Finding", "LintReport", "lint"]
