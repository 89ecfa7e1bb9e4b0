"""Rules as a table."""

import dataclasses

from penzai_shard.rule_kinds import IdentityRule, LargestDimensionRule, NameRule, Rule
from penzai_shard.text_tables import TextTable


@dataclasses.dataclass(frozen=True, repr=False)
class RuleTable(TextTable):
    """What a set of rules says, in its order; ``print`` and notebooks show it.

    Attributes:
        rules: The rules.
        expression: The rules as code.

    >>> print(RuleTable((NameRule("batch", ("data",)),), "AxisRules({'batch': 'data'})"))
    1 rule, to mesh axis data
    logical axis  mesh axes  in which arrays
    ------------  ---------  ---------------
    batch         data       that have it
    AxisRules({'batch': 'data'})
    """

    headings = ("logical axis", "mesh axes", "in which arrays")

    rules: tuple[Rule, ...]
    expression: str

    def text_rows(self) -> list[tuple[str, ...]]:
        """One row per rule."""
        return [_row(rule) for rule in self.rules]

    def text_verdict(self) -> str:
        """How many rules there are, and which mesh axes they use."""
        used = list(dict.fromkeys(name for rule in self.rules for name in rule.mesh_axes))
        rules = "1 rule" if len(self.rules) == 1 else f"{len(self.rules)} rules"
        if not used:
            return rules
        return f"{rules}, to mesh {'axis' if len(used) == 1 else 'axes'} {', '.join(used)}"

    def text_summary(self) -> list[str]:
        """The rules as code."""
        return [self.expression]


def _row(rule: Rule) -> tuple[str, ...]:
    mesh_axes = ", ".join(rule.mesh_axes) or "none: stays whole"
    match rule:
        case NameRule():
            where = "that have it"
            if rule.yields:
                where += " and whose mesh axes are still free"
            return str(rule.logical_axis), mesh_axes, where
        case LargestDimensionRule():
            return "(largest free)", mesh_axes, f"of at least {rule.min_size:,} elements"
        case IdentityRule():
            return "(each)", "the one of the same name", "that have it"
