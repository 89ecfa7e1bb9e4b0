"""Rules as a table."""

from collections.abc import Sequence

from penzai_shard.rule_kinds import IdentityRule, LargestDimensionRule, NameRule, Rule
from penzai_shard.text_tables import PreparedTable


class RuleTable(PreparedTable):
    """What a set of rules says, in its order; ``print`` and notebooks show it."""

    headings = ("logical axis", "mesh axes", "in which arrays")


def rule_table(rules: Sequence[Rule], expression: str) -> RuleTable:
    """The table of some rules.

    Args:
        rules: The rules.
        expression: The rules as code.

    >>> print(rule_table((NameRule("batch", ("data",)),), "AxisRules({'batch': 'data'})"))
    1 rule, to mesh axis data
    logical axis  mesh axes  in which arrays
    ------------  ---------  ---------------
    batch         data       that have it
    AxisRules({'batch': 'data'})
    """
    used = list(dict.fromkeys(name for rule in rules for name in rule.mesh_axes))
    verdict = "1 rule" if len(rules) == 1 else f"{len(rules)} rules"
    if used:
        verdict += f", to mesh {'axis' if len(used) == 1 else 'axes'} {', '.join(used)}"
    return RuleTable(tuple(map(_row, rules)), verdict, (expression,))


def _row(rule: Rule) -> tuple[str, ...]:
    mesh_axes = ", ".join(rule.mesh_axes) or "none: stays whole"
    match rule:
        case NameRule():
            where = "that have it" + " and whose mesh axes are still free" * rule.yields
            return str(rule.logical_axis), mesh_axes, where
        case LargestDimensionRule():
            where = f"of at least {rule.min_size:,} elements"
            also = ", with names or without" if rule.splits_unnamed else ""
            return "(largest free)", mesh_axes, where + also
        case IdentityRule():
            return "(each)", "the one of the same name", "that have it"
