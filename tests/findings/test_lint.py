"""``lint`` as a whole: its report, its options, and that it agrees with the planner."""

import json
import random

import pytest

import penzai_shard as pzs
from penzai_shard.findings.lint import lint
from penzai_shard.findings.set_up import ERRORS, Finding
from tests.findings.set_ups import check_fixes, mesh, plain, struct, transformer, weights

D4M2 = mesh(data=4, model=2)
WEIGHTS = weights(table={"vocabulary": 4096, "embedding": 512}, up={"embedding": 512, "neurons": 8})
WASTEFUL = {"batch": "data", "neurons": "model"}


def test_a_report_has_a_verdict_and_rows_and_becomes_json():
    report = lint(WEIGHTS, D4M2, WASTEFUL)
    (finding,) = report.findings
    assert isinstance(finding, Finding)
    assert (report.ok, bool(report)) == (False, False)
    data = json.loads(report.to_json())
    assert data["rows"][0]["where"] == finding.path == "table"
    assert data["rows"][0]["wasted"] == finding.wasted_bytes == 4096 * 512 * 4 // 2
    assert str(finding).startswith("table: ")
    assert str(finding).endswith(finding.fix)
    assert str(lint(WEIGHTS, D4M2, WASTEFUL | {"vocabulary": "model"})).startswith("nothing found:")


def test_waste_is_what_the_fix_saves_on_each_device():
    subject = {"model_or_state": WEIGHTS, "mesh": D4M2, "rules": WASTEFUL}
    (finding,) = check_fixes(subject).findings
    held = pzs.make_plan(WEIGHTS, D4M2, WASTEFUL).bytes_per_device
    rules = eval(finding.fix.removeprefix("Write rules=").removesuffix("."))
    assert held - pzs.make_plan(WEIGHTS, D4M2, rules).bytes_per_device == finding.wasted_bytes


@pytest.mark.parametrize(
    ("rule", "kind"), [({"embedding": "dta"}, "unknown"), ({"embeding": "data"}, "unused")]
)
def test_waste_is_looked_for_once_the_rules_are_right_which_a_note_says(rule, kind):
    report = lint(WEIGHTS, D4M2, WASTEFUL | rule)
    assert {finding.kind for finding in report.findings} == {kind}
    assert any("waste" in note for note in report.notes)


def test_the_largest_waste_of_all_blocks_comes_first():
    blocks = {f"block_{i}": weights(w={"projection": 1024, "neurons": 1024}) for i in range(9)}
    found = lint(WEIGHTS | blocks, D4M2, {"batch": "data"}).findings
    assert [len(one.paths) for one in found] == [9, 0, 0]


def test_what_is_smaller_than_min_bytes_is_no_waste():
    wasted = 4096 * 512 * 4
    assert not lint(WEIGHTS, D4M2, WASTEFUL, min_bytes=wasted)
    assert lint(WEIGHTS, D4M2, WASTEFUL, min_bytes=wasted + 1)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"embeding": "data", "neurons": "model"}, {"embedding": "data", "neurons": "model"}),
        ({"embedding": "data", "neuron": "model"}, {"embedding": "data", "neurons": "model"}),
    ],
)
def test_the_fix_says_what_was_probably_meant(given, meant):
    small = weights(up={"embedding": 8, "neurons": 16})
    finding = lint(small, D4M2, given).findings[0]
    assert finding.fix == f"Write rules={meant}."


@pytest.mark.parametrize("option", [{"min_bytes": "1"}, {"on_unnamed": "ignore"}])
def test_options_that_cannot_be_read_are_refused(option):
    with pytest.raises(pzs.RuleTypeError) as caught:
        lint(WEIGHTS, D4M2, WASTEFUL, **option)
    assert next(iter(option)) in str(caught.value)


@pytest.mark.parametrize("given", [(WEIGHTS, {"data": 8}), (transformer, D4M2)])
def test_a_mesh_and_a_model_have_to_be_given(given):
    with pytest.raises(pzs.RuleTypeError):
        lint(*given, {"embedding": "data"})


def draw(seed):
    """A tree, a mesh and rules, some of which fit, as keyword arguments."""
    rng = random.Random(seed)
    names, sizes = ["a", "b", "c", "d"], [2, 3, 4, 6, 8, 12, 16]
    tree = {}
    for i in range(rng.randint(1, 4)):
        axes = rng.sample(names, rng.randint(1, 3))
        tree[f"w_{i}"] = struct(**{name: rng.choice(sizes) for name in axes})
    if rng.random() < 0.2:
        tree |= plain(plain=(4, 4))
    on = mesh(**{name: rng.choice([1, 2, 4]) for name in rng.sample(["x", "y", "z"], 2)})
    pairs = [
        (rng.choice([*names, "e"]), rng.choice(["x", "y", "z", None, ("x", "y")]))
        for _ in range(rng.randint(0, 4))
    ]
    rules = pzs.AxisRules(dict(pairs) if rng.random() < 0.5 else pairs)
    presets = [None, None, pzs.fully_sharded("x", min_size=1), pzs.tensor_parallel("y", names)]
    preset = rng.choice(presets)
    rules = rules if preset is None else rules | preset
    return {"model_or_state": tree, "mesh": on, "rules": rules}


def refuse(subject):
    """The error of the planner, or None."""
    try:
        pzs.make_plan(*subject.values())
    except pzs.ShardingError as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore::penzai_shard.ShardingWarning")
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_every_error_of_the_planner_is_a_finding_and_nothing_else_is_an_error(start):
    refused = 0
    for seed in range(start, start + 50):
        subject = draw(seed)
        errors = [one for one in check_fixes(subject).findings if one.kind in ERRORS]
        found = {(one.kind, path) for one in errors for path in one.paths or [one.path]}
        error = refuse(subject)
        if isinstance(error, pzs.MeshError):
            assert {p.what for p in error.problems} <= {one.what for one in errors}
        else:
            refused += error is not None
            assert found == {(p.kind, p.path) for p in (error.problems if error else ())}
    assert 5 < refused < 45
