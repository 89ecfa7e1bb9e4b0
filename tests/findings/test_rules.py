"""Mistakes in rules, layouts and meshes, each found, and what is meant as it is, not."""

import pytest
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

import penzai_shard as pzs
from penzai_shard.findings.lint import lint
from tests.findings.set_ups import (
    FAMILIES,
    check_fixes,
    mesh,
    plain,
    state_of,
    struct,
    transformer,
    weights,
)

SMALL = weights(up={"embedding": 8, "neurons": 16}, down={"neurons": 16, "embedding": 8})
ODD = weights(up={"embedding": 8, "neurons": 10}, down={"neurons": 10, "embedding": 8})
OTHER = weights(up={"embed": 8, "mlp": 16})
LARGE = weights(
    table={"vocabulary": 4096, "embedding": 512},
    up={"embedding": 512, "neurons": 2048},
    down={"neurons": 2048, "embedding": 512},
)
HEAD = weights(head={"rank": 1024, "vocabulary": 1024})
TOKENS = struct("int32", batch=16, seq=8)
WIDE = {"up": {"embedding": 512, "neurons": 2048}, "out": {"heads": 512, "embedding": 1024}}
BLOCKS = {f"block_{i}": weights(**WIDE) for i in range(6)}
D4M2, D8 = mesh(data=4, model=2), mesh(data=8)
D2T2 = mesh(data=2, tensor=2)
BY_NAME = {"embedding": "data", "neurons": "model"}
DP, FSDP, TP, Layout = pzs.data_parallel, pzs.fully_sharded, pzs.tensor_parallel, pzs.Layout
MEGATRON = {"batch": "data", "neurons": "model"}


def of_optimizer(rules):
    return Layout(parameters={}, compute={"batch": "data"}, optimizer=rules)


MPL, MLP = {"neurons": "mpl", "heads": None}, {"neurons": "mlp", "heads": None}
# Kind, path, model or a function that makes it, mesh, rules.
MISTAKES = {
    "fully sharded over nothing": ("unknown", "rules", LARGE, mesh(fsdp=8), FSDP()),
    "layout for another mesh": ("unknown", "layout.parameters", transformer, D2T2,
        Layout.two_dimensional()),
    "of the optimizer": ("unknown", "layout.optimizer", SMALL, D8,
        of_optimizer({"embedding": "dta"})),
    "layout, too few heads": ("indivisible", "attention", transformer, mesh(data=2, model=8),
        Layout.tensor_parallel()),
    "indivisible in the state": ("indivisible", "opt_state", lambda: state_of(ODD), mesh(data=4),
        of_optimizer({"neurons": "data"})),
    "preset for other names": ("unused", "rules", OTHER, D4M2, DP() | TP()),
    "unused beside a batch": ("unused", "rules", SMALL, D4M2, MEGATRON | {"rows": "data"},
        struct(batch=8, embedding=8)),
    "misspelt name of a layout": ("misfit", "layout/neurons", OTHER, D4M2,
        Layout.tensor_parallel(names=MPL)),
    "layout with names": ("unknown", "layout.parameters", OTHER, D4M2,
        Layout.tensor_parallel(model="modle", names=MLP)),
    "forgotten by FSDP": ("under-sharded", "head", LARGE | HEAD, D8,
        {"batch": "data", "embedding": "data"}),
    "in every block": ("under-sharded", "block_{0-5}/out", BLOCKS, D4M2, MEGATRON),
    "in the optimizer's state": ("under-sharded", "opt_state", lambda: state_of(LARGE), D8,
        of_optimizer({"neurons": "data"})),
    "beside a preset": ("under-sharded", "table", LARGE, D4M2,
        FSDP("model") | {"vocabulary": "model"}),
    "in a train state": ("under-sharded", "params/table", lambda: state_of(LARGE), D4M2, MEGATRON),
    "no rules": ("idle mesh axis", "mesh", SMALL, D8, None),
    "layout for one mesh axis": ("idle mesh axis", "mesh", transformer, mesh(data=2, model=2),
        Layout.data_parallel()),
    "no names, a preset": ("unnamed", "w", plain(w=(512, 1024)), D8, FSDP()),
    "not a mesh axis": ("unreadable", "rules", SMALL, D8, {"embedding": 3}),
    "preset that was not called": ("unreadable", "rules", SMALL, D8, FSDP),
    "twice in a rule": ("unreadable", "rules", SMALL, D4M2,
        {"embedding": ("data", "data"), "neurons": "model"}),
}  # fmt: skip


def subject_of(row):
    model, on, rules, *batch = row
    model = model() if callable(model) else model
    return {"model_or_state": model, "mesh": on, "rules": rules, "batch": [*batch, None][0]}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_its_fix_works(name):
    kind, path, *row = MISTAKES[name]
    report = check_fixes(subject_of(row))
    assert not report
    assert any(one.kind == kind and path in one.path for one in report.findings), report


MESHES = {
    "data": D4M2,
    "replica": mesh(replica=2, data=4),
    "model": mesh(model=2),
    "one": mesh(data=4),
}
PRESETS = {
    "FSDP": ("one", FSDP()),
    "DP | FSDP": ("one", DP() | FSDP()),
    "TP": ("model", TP()),
    "DP | TP": ("data", DP() | TP()),
    "DP | TP | FSDP": ("data", DP() | TP() | FSDP()),
    "data_parallel": ("one", Layout.data_parallel()),
    "zero1": ("one", Layout.zero1()),
    "fully_sharded": ("one", Layout.fully_sharded()),
    "tensor_parallel": ("data", Layout.tensor_parallel()),
    "vocabulary": ("data", Layout.tensor_parallel(vocabulary="model")),
    "sequence_parallel": ("data", Layout.sequence_parallel()),
    "two_dimensional": ("data", Layout.two_dimensional()),
    "hybrid": ("replica", Layout.hybrid()),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_no_findings_over_any_family(preset):
    on, rules = MESHES[PRESETS[preset][0]], PRESETS[preset][1]
    for family in FAMILIES:
        report = lint(transformer(family, wide=True), on, rules)
        assert report, (family, report)
    # Here nothing is as large as the presets split by default.
    assert lint(transformer(), on, rules)
    if isinstance(rules, Layout):
        # Each layout with one of the families.
        turn = [*PRESETS].index(preset) % len(FAMILIES)
        report = lint(transformer([*FAMILIES][turn]), on, rules, batch=TOKENS)
        assert report.ok, report
        assert not report.notes


@pytest.mark.parametrize("family", FAMILIES)
def test_wide_families_have_waste_to_be_found(family):
    """Without this the test above would show nothing."""
    report = lint(transformer(family, wide=True), D4M2, MEGATRON)
    assert {finding.kind for finding in report.findings} == {"under-sharded"}


@pytest.mark.parametrize("preset", ["data_parallel", "zero1", "fully_sharded", "two_dimensional"])
def test_presets_have_no_findings_over_train_states(preset):
    on = D4M2 if preset == "two_dimensional" else mesh(data=4)
    layout = getattr(Layout, preset)(names={"heads": None} if on is D4M2 else {})
    assert lint(state_of(LARGE), on, layout)


@pytest.mark.parametrize(
    "preset", ["fully_sharded", "tensor_parallel", "sequence_parallel", "two_dimensional"]
)
def test_a_model_with_the_edits_of_a_preset_has_no_findings(preset):
    on = mesh(data=2) if preset == "fully_sharded" else mesh(data=2, model=2)
    layout = getattr(Layout, preset)()
    assert lint(layout.recipe(transformer(), on).apply(transformer()), on, layout)


def by_name(on, rules):
    return pzs.ConstrainShardingByName(on, rules)


def pinned_blocks():
    edits = pzs.constrain_blocks(TransformerBlock, mesh(data=2), {"batch": "data"})
    return edits.apply(transformer())


ROWS = pz.nn.Sequential([pz.nn.Identity(), by_name(D4M2, {"batch": "data", "rows": "model"})])
PIN = {"pin": by_name(D4M2, {"batch": "data"})}
ACTIVATIONS = {"embedding": "data", "kv_seq": None, "positions": None, "batch": "data"}
BY_TP = {"neurons": "model", "vocabulary": "model"}
HARMLESS = {
    "sequences": (SMALL, mesh(data=2, context=4), {"batch": "data", "seq": "context"}),
    "axes of activations": (SMALL, D8, ACTIVATIONS),
    "split by a constraint": (ROWS, D4M2, {}),
    "batch by a constraint": (LARGE | PIN, D4M2, BY_TP),
    "constraints in blocks": (pinned_blocks, mesh(data=2), Layout.data_parallel()),
    "a state by one table": (lambda: state_of(SMALL), D4M2, BY_NAME),
    "the optimizer's part": (lambda: state_of(LARGE), D8, of_optimizer(FSDP(min_size=1))),
    "another batch": (SMALL, D8, DP(batch_axis="examples")),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_set_up_has_no_findings(name):
    model, on, rules = HARMLESS[name]
    is_function = callable(model) and not isinstance(model, pz.nn.Layer)
    report = lint(model() if is_function else model, on, rules)
    assert report.ok, report
