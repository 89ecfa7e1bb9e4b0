"""A layout and a candidate in words, the same whatever order their rules were given in."""

import collections

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.layouts import Layout
from penzai_shard.meshes import mesh_text
from penzai_shard.rule_kinds import NameRule


def layout_words(layout: Layout) -> str:
    """What a layout says, for people.

    >>> layout_words(Layout(parameters={"b": "data", "a": "data"}, compute={"batch": "data"}))
    'parameters: a, b over data | activations: batch over data'
    """
    said = [f"parameters: {_rules_words(layout.parameters)}"]
    if layout.optimizer is not None and layout.optimizer != layout.parameters:
        said.append(f"optimizer: {_rules_words(layout.optimizer)}")
    said.append(f"activations: {_rules_words(layout.compute)}")
    if layout.between_blocks is not None:
        said.append(f"between blocks: {_rules_words(layout.between_blocks)}")
    if layout.rematerialise is not None:
        said.append(f"blocks keep {layout.rematerialise}")
    if layout.reshard_after_forward:
        said.append("gathered again in the backward pass")
    if layout.manual:
        said.append("blocks run per device")
    return " | ".join(said)


def step_words(candidate: Candidate) -> str:
    """The mesh and the microbatches of a candidate.

    >>> layout = Layout(parameters={}, compute={})
    >>> step_words(Candidate((("data", 4), ("model", 2)), layout, microbatches=2))
    'data=4, model=2, 2 microbatches'
    """
    parts = f", {candidate.microbatches} microbatches" if candidate.microbatches > 1 else ""
    return f"{mesh_text(candidate.mesh_shape)}{parts}"


def candidate_words(candidate: Candidate) -> str:
    """A candidate in words; two that are laid out otherwise have other words."""
    return f"{step_words(candidate)}: {laid_out_words(candidate)}"


def laid_out_words(candidate: Candidate) -> str:
    """The layout of a candidate, and what is stored padded.

    >>> from penzai_shard.choosing.candidates.candidate import PaddedAxis
    >>> layout = Layout(parameters={"vocabulary": "model"}, compute={})
    >>> padded = (PaddedAxis("vocabulary", 50257, 50264),)
    >>> laid_out_words(Candidate((("model", 8),), layout, padded=padded))
    'parameters: vocabulary over model | activations: whole | padded: vocabulary 50,257 to 50,264'
    """
    said = layout_words(candidate.layout)
    if not candidate.padded:
        return said
    padded = [f"{name} {length:,} to {stored:,}" for name, length, stored in candidate.padded]
    return f"{said} | padded: {', '.join(padded)}"


def _rules_words(rules: AxisRules) -> str:
    over: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    others: list[str] = []
    for rule in rules.rules:
        if not isinstance(rule, NameRule):
            others.append(repr(AxisRules.from_rules([rule])))
        elif rule.mesh_axes:
            over[rule.mesh_axes].append(str(rule.logical_axis))
    named = [
        f"{', '.join(sorted(dict.fromkeys(names)))} over {' and '.join(mesh_axes)}"
        for mesh_axes, names in sorted(over.items())
    ]
    return "; ".join([*named, *others]) or "whole"
