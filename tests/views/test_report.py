"""What a page says, against the reports that it is a view of; and what it leaves alone."""

import collections
import dataclasses
import functools
import json
import re

import jax
import optax
import pytest
from jax.sharding import AbstractMesh
from penzai import pz

from penzai_shard import (
    Jitted,
    Layout,
    TrainState,
    abstract_model,
    compile_step,
    lint,
    make_mesh,
    make_plan,
    report,
    whole_files,
)
from penzai_shard.errors import MeshError, PropagationError, RuleTypeError
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.views import report_page
from penzai_shard.views.heavy_layers import heavy_in_memory, heavy_in_plan, heavy_in_traffic
from tests.small_train_steps import EVERYTHING, build_mlp, report_of
from tests.views.page_words import words_of


@pytest.fixture(scope="module")
def memory():
    """What a train step of three blocks needs."""
    return report_of(EVERYTHING, build=functools.partial(build_mlp, blocks=3))


@pytest.fixture(scope="module")
def model():
    return abstract_model(build_mlp, blocks=3)


@pytest.fixture
def page_of(tmp_path):
    """Writes a page: its text without elements."""

    def written(*args, **kwargs):
        return words_of(report(*args, path=tmp_path / "report.html", **kwargs))

    return written


def test_the_same_input_gives_the_same_bytes_and_one_file(memory, model, tmp_path):
    mesh = memory.program.step.mesh
    written = []
    for name in ("one.html", "new/other.html"):
        path = report(model, mesh, EVERYTHING, memory.program, path=tmp_path / name)
        assert path == tmp_path / name
        assert [each.name for each in path.parent.iterdir() if each.is_file()] == [path.name]
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_every_report_is_on_the_page_with_its_verdict_and_notes(memory, model, page_of):
    mesh = memory.program.step.mesh
    words = page_of(model, mesh, EVERYTHING, memory.program)
    reports = [
        make_plan(model, mesh, EVERYTHING),
        memory,
        CollectiveReport.of(memory.program),
        lint(model, mesh, EVERYTHING),
        report_page.why(memory.program.step),
    ]
    for one in reports:
        table = one.table()
        for line in (table.text_verdict(), *table.text_summary()):
            assert " ".join(line.split()) in words
        for row in table.text_rows():
            assert all(" ".join(cell.split()) in words for cell in row)


PARTS = {
    "lm/block_{0-2}/attention": (("query", 32), ("key", 8)),
    "lm/block_{0-2}/mlp": (("up", 64), ("down", 16)),
    "lm/embedder": (("embeddings", 128),),
    "lm/head": (("weights", 24),),
}


def test_what_holds_most_in_a_plan_is_what_its_arrays_add_up_to():
    arrays = {}
    for part, layers in PARTS.items():
        for name, length in layers:
            for block in range(3 if "{0-2}" in part else 1):
                path = f"{part}/{name}.w" if "block" in part else f"{part}.{name}"
                struct = jax.ShapeDtypeStruct((length,), "float32")
                arrays[path.replace("{0-2}", str(block))] = pz.nx.NamedArray(
                    collections.OrderedDict(wide=length), struct
                )
    plan = make_plan(arrays, AbstractMesh((8,), ("data",)), {"wide": "data"})
    whole = (3 * (32 + 8 + 64 + 16) + 128 + 24) * 4 / 8
    expected = [
        ("lm/block_{0-2}/mlp", 3 * 80 * 4 / 8),
        ("lm/embedder", 128 * 4 / 8),
        ("lm/block_{0-2}/attention", 3 * 40 * 4 / 8),
        ("lm/head", 24 * 4 / 8),
    ]
    heavy = heavy_in_plan(plan)
    assert [(layer.layer, layer.bytes) for layer in heavy] == expected
    assert [layer.share for layer in heavy] == [size / whole for _, size in expected]


def test_of_a_state_parameters_and_gradients_count_where_their_layers_are(model, memory):
    state = TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(0))
    plan = make_plan(state, memory.program.step.mesh, {"neurons": "model"})
    heavy = {layer.layer: layer for layer in heavy_in_plan(plan)}
    of_model = {
        layer.layer: layer.bytes
        for layer in heavy_in_plan(make_plan(model, memory.program.step.mesh, {"neurons": "model"}))
    }
    for name, size in of_model.items():
        assert heavy[name].bytes == 2 * size
        assert {*re.findall(r"parameters|gradients", heavy[name].what)} == {
            "parameters",
            "gradients",
        }
    assert sum(layer.bytes for layer in heavy.values()) == plan.bytes_per_device


def test_what_holds_most_while_a_step_runs_adds_up(memory):
    heavy = {layer.layer: layer for layer in heavy_in_memory(memory)}
    said = json.loads(memory.to_json())
    stored = sum(
        group["array_bytes"] + group["optimizer_bytes"]
        for group in said["groups"]
        if group["part"] == "parameters"
    )
    held = memory.temporaries_by_layer
    in_blocks = sum(one.bytes for one in held if one.label.startswith("block_"))
    assert stored > 0 < in_blocks
    assert heavy["block_{0-2}"].bytes == stored + in_blocks
    assert sum(layer.bytes for layer in heavy.values()) == (
        said["resident"] + said["inputs"] + sum(one.bytes for one in held)
    )


def test_what_sends_most_adds_up(memory):
    traffic = json.loads(CollectiveReport.of(memory.program).to_json())
    heavy = {layer.layer: layer for layer in heavy_in_traffic(CollectiveReport.of(memory.program))}
    sent = collections.Counter()
    for one in traffic["collectives"]:
        for part in one["parts"]:
            owner = "block" if part["labels"] else "unknown"
            sent[owner] += part["payload_bytes"] / one["payload_bytes"] * one["wire_bytes"]
    assert heavy["block_{0-2}"].bytes == pytest.approx(sent["block"])
    assert sum(layer.share for layer in heavy.values()) == pytest.approx(1)


def test_what_runs_in_a_loop_counts_as_often_as_it_runs_and_what_is_not_known_does_not(memory):
    found = CollectiveReport.of(memory.program)
    first, second, *_ = found.collectives
    looped = dataclasses.replace(first, times=3)
    unknown = dataclasses.replace(second, times=None)
    report_of_loops = dataclasses.replace(found, collectives=(looped, unknown))
    (heavy,) = heavy_in_traffic(report_of_loops)
    assert (heavy.bytes, heavy.share) == (pytest.approx(3 * first.wire_bytes), pytest.approx(1))


def test_without_a_step_the_page_says_what_is_missing(model, memory, page_of):
    words = page_of(model, memory.program.step.mesh, EVERYTHING)
    assert words.count("No step is given") == 3
    assert "Each device holds" in words
    assert "Most traffic" not in words


def test_a_layout_is_planned_as_it_says(memory, model, page_of):
    mesh = memory.program.step.mesh
    layout = Layout.two_dimensional(min_size=0, names={"heads": None})
    assert layout.plan(model, mesh).table().text_verdict() in page_of(model, mesh, layout)


@pytest.mark.parametrize(
    "rules", [{"neurons": "modle"}, {"embedding": "data", "neurons": "data"}, {"odd": "data"}]
)
def test_rules_that_do_not_fit_are_on_the_page_with_what_to_write(rules, page_of):
    mesh = AbstractMesh((4, 2), ("data", "model"))
    shape = {"odd": 6, "neurons": 8, "embedding": 8}
    named = pz.nx.NamedArray(shape, jax.ShapeDtypeStruct((6, 8, 8), "float32"))
    words = page_of({"w": named}, mesh, rules)
    assert "There is no valid layout." in words
    (finding, *_) = lint({"w": named}, mesh, rules).findings
    assert " ".join(finding.problem.split()) in words
    assert finding.fix
    assert " ".join(finding.fix.split()) in words


def test_what_is_stored_padded_is_on_the_page(page_of):
    weights = {"up": pz.nx.ones({"embedding": 8, "neurons": 7})}
    page = page_of(weights, make_mesh({"data": 8}), {"neurons": "data"}, on_indivisible="pad")
    assert "'neurons' (7) padded to 8 over mesh axis 'data' (8)" in page
    assert "does not divide" not in page


def test_where_layouts_cannot_be_followed_the_page_says_so_and_has_the_rest(
    memory, model, page_of, monkeypatch
):
    def absent(step):
        raise PropagationError("this jaxlib does not offer it")

    monkeypatch.setattr(report_page, "why", absent)
    words = page_of(model, memory.program.step.mesh, EVERYTHING, memory.program)
    assert "Why this jaxlib does not offer it" in words
    assert CollectiveReport.of(memory.program).table().text_verdict() in words


def test_a_step_with_arrays_is_compiled_once_and_not_run(page_of, monkeypatch):
    compiled = []

    def counted(step, *args, **kwargs):
        compiled.append(step)
        return compile_step(step, *args, **kwargs)

    monkeypatch.setattr(report_page, "compile_step", counted)
    mesh = make_mesh({"data": 8})
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    array = jax.device_put(jax.numpy.ones((8, 4)), sharding)
    model = {"w": pz.nx.wrap(array, "batch", "out")}
    step = jax.jit(lambda a, scale: a * scale, donate_argnums=0)
    words = page_of(model, mesh, {"batch": "data"}, step, array, scale=array)
    assert "no collectives" in words
    assert compiled == [step]
    assert not array.is_deleted()


def test_what_flows_is_looked_at_where_it_is_known_what_the_model_is_called_with(
    memory, model, page_of, monkeypatch
):
    mesh = memory.program.step.mesh
    fits, does_not = pz.nx.ones({"batch": 8, "embedding": 16}), pz.nx.ones({"batch": 6})
    assert "not looked at" in page_of(model, mesh, EVERYTHING)
    assert "not looked at" in page_of(model, mesh, EVERYTHING, memory.program)
    for step in (None, memory.program):
        words = page_of(model, mesh, EVERYTHING, step, batch=fits)
        assert ("not looked at" in words, "Findings nothing found" in words) == (False, True)
        words = page_of(model, mesh, EVERYTHING, step, batch=does_not)
        assert "logical axis 'batch' (6) does not divide" in words
    # A step's own inputs are its own, unless it is the model.
    called = []

    def compiled(step, *args, **kwargs):
        called.append((args, kwargs))
        return memory.program

    monkeypatch.setattr(report_page, "compile_step", compiled)
    for step, args, kwargs, is_known in (
        (jax.jit(lambda batch: batch), (), {"batch": does_not}, False),
        (pz.nn.Identity(), (does_not,), {}, False),
        (abstract_model(build_mlp, blocks=2), (does_not,), {}, False),
        (Jitted(model), (does_not,), {}, True),
    ):
        words = page_of(model, mesh, EVERYTHING, step, *args, **kwargs)
        assert ("(6) does not divide" in words) == is_known != ("not looked at" in words)
        assert called.pop() == (args, kwargs)


def test_a_mistake_in_the_call_is_refused_and_nothing_is_written(memory, model, tmp_path):
    mesh = memory.program.step.mesh
    path = tmp_path / "report.html"
    with pytest.raises(RuleTypeError, match=r"no step is given, and tokens would be"):
        report(model, mesh, EVERYTHING, path=path, tokens=1)
    with pytest.raises(RuleTypeError, match=r"is a folder, .* Give path='.*report.html'"):
        report(model, mesh, EVERYTHING, path=tmp_path)
    other = AbstractMesh((8,), ("data",))
    text = r"on mesh \(data=4, model=2\), and the page is of mesh \(data=8\)"
    with pytest.raises(MeshError, match=text):
        report(model, other, {}, memory.program, path=path)
    with pytest.raises(RuleTypeError):
        report(model, mesh, 42, path=path)
    with pytest.raises(RuleTypeError):
        report(model, {"data": 4}, {}, path=path)
    assert [*tmp_path.iterdir()] == []


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    path = whole_files.write_whole(tmp_path / "page.html", "before")

    def full(_):
        raise OSError("no space is left")

    monkeypatch.setattr(whole_files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        whole_files.write_whole(path, "after")
    assert path.read_text(encoding="utf-8") == "before"
    assert [*tmp_path.iterdir()] == [path]
