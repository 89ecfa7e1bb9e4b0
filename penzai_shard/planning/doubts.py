"""Tells which rules are allowed and look like a mistake."""

from collections.abc import Collection, Hashable

from penzai_shard.paths import nearest
from penzai_shard.rules import AxisRules


def find_doubts(
    rules: AxisRules, present: Collection[Hashable], mesh_axes: Collection[str]
) -> list[str]:
    """Rules for a name that is nearly a logical axis of the tree, and no rules at all.

    Args:
        rules: The rules.
        present: The logical axes of the arrays.
        mesh_axes: The mesh axes.

    Returns:
        A sentence for each of them, for warnings.

    >>> find_doubts(AxisRules({"embeding": "data"}), ["embedding"], ["data"])
    ["rule 'embeding' -> 'data' matches no logical axis of this tree. Did you mean 'embedding'?"]
    """
    found = []
    named = {part for name in present for part in (name if isinstance(name, tuple) else (name,))}
    if rules == AxisRules(None) and present and named.isdisjoint(mesh_axes):
        names = ", ".join(map(repr, present))
        found.append(
            f"without rules every array is replicated: no logical axis ({names}) has the name of a "
            f"mesh axis. Write rules={{{next(iter(present))!r}: {next(iter(mesh_axes))!r}}}, or "
            "rules={} for copies."
        )
    for rule in rules.rules:
        if rule.logical_axis is None or rule.logical_axis in present or rule.for_activations:
            continue
        near = nearest(rule.logical_axis, set(present) - set(rules.logical_axes))
        if near is not None:
            found.append(
                f"rule {rule} matches no logical axis of this tree. Did you mean {near!r}?"
            )
    return found
