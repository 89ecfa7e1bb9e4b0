"""Each seeded mistake is found, and its fix, taken out of the text and pasted, mends it."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from tests.linting import seeded_mistakes


def seeded(name):
    kind, model, mesh, rules, *batch = seeded_mistakes.MISTAKES[name]
    model = model() if callable(model) else model
    return kind, {"model": model, "mesh": mesh, "rules": rules, "batch": [*batch, None][0]}


def linted(subject):
    return pzs.lint(subject["model"], subject["mesh"], subject["rules"], batch=subject["batch"])


def pasted(subject, finding):
    """What is linted after the fix was taken out of the text of a finding and run."""
    _, mark, fix = str(finding).partition(" Fix: ")
    assert mark, finding
    names = {**vars(pzs), "pz": pz, "dataclasses": dataclasses, **subject}
    names["layout"] = names["rules"]
    exec(fix, names)
    changed = {name: names[name] for name in subject}
    if fix.startswith("layout"):
        changed["rules"] = names["layout"]
    assert any(changed[name] is not subject[name] for name in subject), fix
    return changed


def keys(report):
    return {finding.key for finding in report.findings}


@pytest.mark.parametrize("name", seeded_mistakes.MISTAKES)
def test_a_seeded_mistake_is_found_and_every_fix_works_when_pasted(name):
    kind, subject = seeded(name)
    report = linted(subject)
    assert not report.ok
    assert kind in [finding.kind for finding in report.findings]
    for finding in report.findings:
        assert finding.path in str(finding)
        left = keys(linted(pasted(subject, finding)))
        assert finding.key not in left
        assert left <= keys(report)


@pytest.mark.parametrize("name", seeded_mistakes.MISTAKES)
def test_fixes_pasted_one_after_the_other_leave_nothing_to_be_found(name):
    _, subject = seeded(name)
    for _ in range(6):
        report = linted(subject)
        if report.ok:
            return
        subject = pasted(subject, report.findings[0])
    raise AssertionError(f"still found: {report}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("misspelt mesh axis", {"embedding": "data", "neurons": "model"}),
        (
            "misspelt beside an idle mesh axis",
            {"batch": "data", "embedding": "data", "neurons": "model"},
        ),
        ("reversed rule", {"embedding": "data", "neurons": "model"}),
        ("misspelt logical axis", {"embedding": "data", "neurons": "model"}),
        ("singular", {"embedding": "data", "neurons": "model"}),
    ],
)
def test_the_fix_says_what_was_probably_meant(name, meant):
    _, subject = seeded(name)
    finding = linted(subject).findings[0]
    assert pzs.AxisRules(pasted(subject, finding)["rules"]) == pzs.AxisRules(meant)


@pytest.mark.parametrize("short", ["embed", "emb", "embedding"])
def test_a_logical_axis_that_is_cut_short_is_written_out(short):
    meant = "embedding" if short != "embedding" else "embed"
    weights = seeded_mistakes.weights(up={meant: 8, "neurons": 16})
    rules = {short: "data", "neurons": "model"}
    (finding,) = pzs.lint(weights, seeded_mistakes.D4M2, rules).findings
    assert finding.kind == "unused"
    assert f"Did you mean {meant!r}?" in str(finding)
    assert finding.fix == f"rules = { ({meant: 'data', 'neurons': 'model'})!r}"


def held_bytes(tree, mesh, rules):
    """What a device holds, by JAX's own shard shapes."""
    placed = jax.tree.leaves(pzs.make_plan(tree, mesh, rules).restore_structs())
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in placed
    )


OF_WASTE = [
    "forgotten table",
    "forgotten mesh axis",
    "array forgotten by FSDP",
    "waste in every block",
]


@pytest.mark.parametrize("name", OF_WASTE)
def test_wasted_bytes_are_those_that_the_fix_saves_on_each_device(name):
    _, subject = seeded(name)
    before = held_bytes(*(subject[each] for each in ("model", "mesh", "rules")))
    wasteful = [each for each in linted(subject).findings if each.kind == "under-sharded"]
    assert wasteful
    for finding in wasteful:
        mended = pasted(subject, finding)
        also = [other for other in wasteful if other.key not in keys(linted(mended))]
        after = held_bytes(mended["model"], mended["mesh"], mended["rules"])
        assert before - after == sum(other.wasted_bytes for other in also)
