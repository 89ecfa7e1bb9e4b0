"""Tells which rules are allowed and look like a mistake."""

from collections.abc import Collection, Hashable

from penzai_shard.paths import nearest
from penzai_shard.rules import IDENTITY, AxisRules


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
        near = nearest(rule.logical_axis, set(present) - set(rules.logical_axes))
        if near is not None:
            found.append(
                f"rule {rule} matches no logical axis of this tree. Did you mean {near!r}?"
            )
    asked = _asked_names(rules, mesh_axes)
    named = {part for name in present for part in (name if isinstance(name, tuple) else (name,))}
    # Rules for activations count where they name an axis, and are not missed where they do not.
    is_named = not named.union(present).isdisjoint(asked.union(rules.logical_axes))
    if not found and asked and present and not is_named:
        names = ", ".join(map(repr, present))
        found.append(
            f"no rule names a logical axis of this tree ({names}), so that every device gets a "
            f"copy. Write rules={{{next(iter(present))!r}: {next(iter(mesh_axes))!r}}}, or "
            "rules={} for copies."
        )
    return found


def _asked_names(rules: AxisRules, mesh_axes: Collection[str]) -> set[Hashable]:
    """The names that rules speak of; none if some rule needs no names, or none splits anything."""
    named = [rule for rule in rules.rules if rule != IDENTITY and not rule.for_activations]
    if any(rule.logical_axis is None for rule in named):
        return set()
    asked = {*mesh_axes} if IDENTITY in rules.rules else set()
    is_split = asked or any(rule.mesh_axes for rule in named)
    return asked.union(rule.logical_axis for rule in named) if is_split else set()
