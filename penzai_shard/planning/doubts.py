"""Tells which rules are allowed and look like a mistake."""

from collections.abc import Collection, Hashable

from penzai_shard.paths import nearest
from penzai_shard.rules import IDENTITY, AxisRules


def _longer_or_shorter(name: Hashable, others: Collection[Hashable]) -> set[Hashable]:
    """Other names with more words or fewer: "features_out" is another axis than "features"."""
    words = {other: {*str(other).split("_")} for other in (name, *others)}
    return {x for x in others if words[x] < words[name] or words[name] < words[x]}


def find_doubts(
    rules: AxisRules, present: Collection[Hashable], mesh_axes: Collection[str]
) -> list[str]:
    """Rules for a name that is nearly a logical axis of the tree, and rules of which none is one.

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
    for rule in rules.rules:
        if rule.logical_axis is None or rule.logical_axis in present or rule.for_activations:
            continue
        others = set(present) - set(rules.logical_axes)
        near = nearest(rule.logical_axis, others - _longer_or_shorter(rule.logical_axis, others))
        if near is not None:
            found.append(
                f"rule {rule} matches no logical axis of this tree. Did you mean {near!r}?"
            )
    # Rules for activations count where they name an axis, and are not missed where they do not; one
    # for the largest dimension needs no names.
    asked = [rule for rule in rules.rules if not rule.for_activations]
    needs_names = not any(rule.logical_axis is None and rule.mesh_axes for rule in asked)
    is_split = any(rule == IDENTITY or rule.mesh_axes for rule in asked)
    known = {*rules.logical_axes, *(mesh_axes if IDENTITY in asked else ())}
    parts = {part for name in present for part in (name if isinstance(name, tuple) else (name,))}
    is_named = not known.isdisjoint(parts.union(present))
    if present and is_split and needs_names and not (found or is_named):
        names = ", ".join(map(repr, present))
        found.append(
            f"no rule names a logical axis of this tree ({names}), so that every device gets a "
            f"copy. Write rules={{{next(iter(present))!r}: {next(iter(mesh_axes))!r}}}, or "
            "rules={} for copies."
        )
    return found
