"""``penzai-shard price`` and ``lock`` as a shell sees them."""

import argparse
import dataclasses
import json
import pathlib

import jax
import pytest
from penzai import pz

from penzai_shard.cli import asked_steps, price_commands
from penzai_shard.cli.chosen_layouts import chosen_layout
from penzai_shard.cli.chosen_models import chosen_model
from penzai_shard.cli.chosen_steps import training_step
from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.inspection.devices.quantities import read_bandwidths, read_bytes
from penzai_shard.inspection.locks.locks import ShardingLock
from penzai_shard.inspection.steps.lowered_steps import lower_step
from penzai_shard.layers import RolledLayerStack
from penzai_shard.layouts import Layout
from penzai_shard.training import TrainStep
from tests.views.page_words import words_of

SMALL = (
    "llama-3-8b(num_hidden_layers=3, hidden_size=64, intermediate_size=128, vocab_size=256, "
    "num_attention_heads=4, num_key_value_heads=2)"
)


@pytest.fixture(scope="module")
def compiled():
    """What compiled programs are remembered by, for all tests of this file."""
    return {}


@pytest.fixture(autouse=True)
def compiled_once(compiled, monkeypatch):
    """The same step is compiled once, however often it is asked for."""
    compile_step = asked_steps.compile_step

    def remembered(step, *args, **kwargs):
        if not isinstance(step, TrainStep):
            return compile_step(step, *args, **kwargs)
        leaves, form = jax.tree.flatten((args, kwargs))
        key = (*((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves), form)
        if key not in compiled:
            compiled[key] = compile_step(step, *args, **kwargs)
        return compiled[key]

    monkeypatch.setattr(asked_steps, "compile_step", remembered)
    compile_ahead = asked_steps.compile_ahead

    def ahead(step, *args, topology):
        # The one step that is compiled in another process here.
        assert (topology.name, args[0].shape) == ("cpu:8", (64, 128))
        if "ahead" not in compiled:
            compiled["ahead"] = compile_ahead(step, *args, topology=topology)
        return compiled["ahead"]

    monkeypatch.setattr(asked_steps, "compile_ahead", ahead)


TRAINED = ("price", SMALL, "--mesh", "data=4,model=2", "--batch", "8", "--seq", "16")


def test_a_published_model_is_priced_with_its_memory_and_what_it_moves(shell):
    status, printed, errors = shell(*TRAINED, "--json", "--limit", "1GB")
    assert status == 0
    assert errors.startswith("penzai-shard: compiling one training step of batch 8 x 16 tokens")
    found = json.loads(printed)
    planned = shell("plan", SMALL, "--mesh", "data=4,model=2", "--stacked", "--json")[1]
    plan = json.loads(planned)["plan"]
    held = sum(a["bytes_per_device"] for a in plan["arrays"] if a["shape"])
    assert found["memory"]["parameters"] == held
    assert found["memory"]["limit"] == 10**9
    assert found["fits"] is True
    assert found["mesh"] == {"data": 4, "model": 2}
    # Heads and neurons are reduced in every block of the loop.
    looped = [
        one
        for one in found["collectives"]["collectives"]
        if one["mesh_axes"] == ["model"] and one["phase"] == "forward" and one["times"] == 3
    ]
    assert [one["kind"] for one in looped] == ["all-reduce", "all-reduce"]
    assert found["time_at_least_s"] is None


def test_what_does_not_fit_is_exit_status_1_and_says_so(shell):
    status, printed, _ = shell(*TRAINED, "--limit", "10KiB", "--bandwidth", "data=1GB,model=2GB")
    assert status == 1
    text = " ".join(printed.split())
    assert "of 10.0 KiB: does not fit, on each device of mesh (data=4, model=2)" in text
    assert "blocks in a loop, for the backward pass they keep what 'carries' says" in text
    assert "collectives in one step" in text
    assert "Moving this takes at least" in text
    assert "Exact: program, memory and collectives on these devices" in text


def test_the_bound_of_time_is_that_of_the_report(shell):
    arguments = (*TRAINED, "--json", "--bandwidth", "data=1GB,model=2GB")
    found = json.loads(shell(*arguments)[1])
    moved = found["collectives"]["by_mesh_axis"]
    bytes_over = {name: total["wire_bytes"] for name, total in moved.items()}
    by_axis = max(bytes_over["data"] / 1e9, bytes_over["model"] / 2e9)
    assert found["time_at_least_s"] >= by_axis > 0


def test_a_forward_pass_holds_no_optimizer(shell):
    status, printed, _ = shell(*TRAINED, "--inference", "--json")
    found = json.loads(printed)
    assert status == 0
    assert "one forward pass" in found["step"]
    assert found["memory"]["optimizer_state"] == 0
    assert {one["phase"] for one in found["collectives"]["collectives"]} <= {"forward"}


def test_a_function_may_give_any_step_with_its_arguments(shell):
    for function in ("matmul", "matmul(rows=64)", "by_keyword"):
        status, printed, _ = shell("price", f"own.py:{function}", "--json")
        found = json.loads(printed)
        (moved,) = found["collectives"]["collectives"]
        assert (status, moved["kind"], moved["mesh_axes"]) == (0, "all-reduce", ["model"])
        assert moved["payload_bytes"] == 64 * 32 * 4
        assert found["memory"]["inputs"] == 64 * 64 * 4 + 64 * 32 * 4


def test_a_lock_is_written_and_says_what_changed(shell, tmp_path):
    status, printed, _ = shell("lock", "own.py:matmul", "--out", "kept/lock.json")
    assert status == 0
    assert "kept/lock.json" in printed
    assert ShardingLock.load(tmp_path / "kept" / "lock.json").content.mesh == (
        ("data", 4),
        ("model", 2),
    )
    status, printed, _ = shell("lock", "own.py:matmul", "--check", "kept/lock.json")
    assert (status, printed[:9]) == (0, "as locked")
    status, printed, _ = shell("lock", "own.py:matmul(rows=32)", "--check", "kept/lock.json")
    assert status == 1
    assert "is now float32[32" in " ".join(printed.split())
    found = json.loads(shell("lock", "own.py:matmul", "--check", "kept/lock.json", "--json")[1])
    assert found["ok"] is True


def step_of(*arguments):
    """The step that a command line asks for, and the model in it; nothing is compiled."""
    parser = argparse.ArgumentParser()
    price_commands.add_price_commands(parser.add_subparsers())
    options = parser.parse_args(list(arguments))
    chosen = chosen_model(options.model, options.dtype, stacked=False if options.unroll else None)
    step = training_step(chosen, chosen_layout(options, chosen.model), options)
    return step, step.step if options.inference else step.args[0].model


@pytest.mark.parametrize(
    ("options", "text", "policies"),
    [
        ((), "keep what 'carries' says", ["carries"]),
        (("--remat", "nested"), "keep what 'nested' says", ["nested"]),
        (("--remat", "none"), "keep all", [False]),
        (("--inference",), "blocks in a loop", [False]),
        (("--unroll",), "blocks one after the other", []),
        (("--layout", "fully_sharded(rematerialise='dots')"), "keep dots", [False]),
    ],
)
def test_blocks_are_rolled_and_keep_what_was_asked_for(options, text, policies):
    step, model = step_of(*TRAINED[:2], "--mesh", "data=4,model=2", *options)
    rolled = pz.select(model).at_instances_of(RolledLayerStack).get_sequence()
    assert [stack.policy for stack in rolled] == policies
    assert text in step.text


def test_a_number_in_a_layer_does_not_make_a_step_compute_in_more_bits():
    """The norms of GPT-NeoX have their epsilon as a number of Python's."""
    small = "pythia-14m(num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=64)"
    step, model = step_of("price", small, "--mesh", "data=4", "--seq", "8")
    numbers = [leaf for leaf in jax.tree.leaves(model) if leaf.shape == () and leaf.weak_type]
    assert numbers
    assert lower_step(step.step, step.args, step.kwargs).mesh.size == 4


def test_the_batch_is_by_default_one_sequence_for_each_part(shell):
    step, _ = step_of("price", SMALL, "--mesh", "data=4,model=2", "--seq", "16")
    assert step.text.startswith("one training step of batch 4 x 16 tokens")
    tokens = step.kwargs["tokens"]
    assert dict(tokens.named_shape) == {"batch": 4, "seq": 17}
    assert tokens.data_array.sharding.shard_shape((4, 17)) == (1, 17)


def test_a_file_of_rules_says_the_mesh_the_microbatches_and_what_is_kept(tmp_path):
    path = str(tmp_path / "rules.toml")
    layout = Layout.two_dimensional(rematerialise="dots")
    (tmp_path / "rules.toml").write_text(layout.to_toml({"data": 2, "model": 2}, microbatches=4))
    asked = ("price", SMALL, "--rules", path, "--seq", "16")
    step, _ = step_of(*asked, "--batch", "8")
    assert dict(step.args[0].step.sharding.mesh.shape) == {"data": 2, "model": 2}
    assert "batch 8 x 16 tokens in 4 microbatches" in step.text
    assert "they keep dots" in step.text
    with pytest.raises(PlanError, match="--batch 6 cannot be divided into 4 microbatches"):
        step_of(*asked, "--batch", "6")
    assert "in 2 microbatches" in step_of(*asked, "--batch", "6", "--microbatches", "2")[0].text
    (tmp_path / "rules.toml").write_text(Layout.fully_sharded().to_toml({"data": 4}))
    assert "they keep all" in step_of(*asked)[0].text
    step, _ = step_of(*asked, "--mesh", "data=2")
    assert dict(step.args[0].step.sharding.mesh.shape) == {"data": 2}
    (tmp_path / "rules.toml").write_text(Layout.fully_sharded().to_toml())
    with pytest.raises(MeshError, match="the mesh is needed too"):
        step_of(*asked)
    assert "keep what 'carries' says" in step_of(*asked, "--mesh", "data=2")[0].text


@pytest.mark.parametrize("options", [("model=2",), ("data=2", "--rules", "neurons=data")])
def test_a_batch_that_is_not_split_is_one_sequence_on_every_device(options):
    step, _ = step_of("price", SMALL, "--seq", "16", "--mesh", *options)
    assert step.text.startswith("one training step of batch 1 x 16 tokens")
    assert step.kwargs["tokens"].data_array.sharding.is_fully_replicated


def test_a_model_that_cannot_be_laid_out_is_found(shell):
    status, printed, _ = shell("price", SMALL, "--mesh", "data=3", "--layout", "tensor_parallel")
    assert status == 2  # The mesh lacks a mesh axis.
    arguments = ("price", SMALL, "--mesh", "data=4,model=3", "--layout", "two_dimensional")
    status, printed, _ = shell(*arguments)
    assert status == 1
    assert "NO VALID LAYOUT" in printed
    assert "do not divide over mesh axis 'model' (3)" in " ".join(printed.split())
    assert json.loads(shell(*arguments, "--json")[1])["fits"] is False


def test_a_topology_of_simulated_devices_is_priced_as_exactly_as_it_can_be(shell):
    status, printed, _ = shell("price", "own.py:matmul", "--topology", "cpu:8", "--json")
    found = json.loads(printed)
    assert status == 0
    assert found["devices"] == "8 x cpu (cpu:8)"
    (moved,) = found["collectives"]["collectives"]
    assert (moved["kind"], moved["payload_bytes"]) == ("all-reduce", 64 * 32 * 4)
    assert "CPU devices" in found["exact"][0]


def test_a_step_that_is_too_large_says_what_it_needs_and_has_no_program_to_lock(shell, monkeypatch):
    compile_ahead = asked_steps.compile_ahead

    def refused(*args, **kwargs):
        report = compile_ahead(*args, **kwargs)
        small = dataclasses.replace(report.memory.program, memory_limit=1000)
        memory = dataclasses.replace(report.memory, program=small)
        return dataclasses.replace(report, memory=memory, collectives=None, program=None)

    monkeypatch.setattr(asked_steps, "compile_ahead", refused)
    arguments = ("own.py:matmul", "--topology", "cpu:8")
    status, printed, _ = shell("price", *arguments, "--bandwidth", "model=1GB")
    assert status == 1
    assert "of 1000 B: does not fit" in printed
    status, printed, errors = shell("lock", *arguments, "--out", "lock.json")
    assert (status, printed) == (2, "")
    assert "the step does not fit into the devices" in errors


def test_a_price_is_written_as_a_page_with_all_that_is_printed(shell):
    arguments = (*TRAINED, "--limit", "10KiB", "--bandwidth", "data=1GB,model=2GB")
    status, printed, errors = shell(*arguments, "--report", "made/out.html")
    assert status == 1
    assert errors.endswith("penzai-shard: the page is made/out.html\n")
    words = words_of(pathlib.Path("made/out.html"))
    assert words.startswith("llama-3-8b(num_hidden_layers=3,")
    assert "The step does not fit: it needs" in words
    for line in printed.splitlines():
        if line.endswith(".") and line[0].isupper():
            assert line in words
    for section in ("Most memory", "Most traffic", "Findings nothing found: ", "Why on mesh"):
        assert section in words
    assert "not looked at" not in words
    assert json.loads(shell(*TRAINED, "--json", "--report", "made/out.html")[1])["fits"] is None


def test_the_page_of_a_step_alone_says_that_its_model_is_not_known(shell):
    assert shell("price", "own.py:matmul", "--report", "out.html")[0] == 0
    words = words_of(pathlib.Path("out.html"))
    assert words.startswith("own.py:matmul on mesh (data=4, model=2)")
    assert words.count("The step was given without its model and rules.") == 2
    assert "1 collective in one step" in words


def test_a_model_without_a_valid_layout_has_a_page_with_what_to_write(shell):
    arguments = ("price", SMALL, "--mesh", "data=3", "--rules", "embedding=data,batch=data")
    status, printed, _ = shell(*arguments, "--report", "out.html")
    assert status == 1
    assert "NO VALID LAYOUT" in printed
    words = words_of(pathlib.Path("out.html"))
    assert "There is no valid layout. There is 1 finding." in words
    assert words.count("Without a valid layout there is no step to be priced.") == 3
    assert "--rules" in words.partition("Findings")[2]


MISTAKES = {
    ("price", SMALL, "--mesh", "data=8", "--report", "."): "Give --report './report.html'.",
    ("price",): "required: MODEL",
    ("price", SMALL): "the mesh is needed too: --mesh data=8,model=4.",
    ("price", "llama-9", "--mesh", "data=8"): "no published model",
    ("price", "own.py:matmul", "--mesh", "data=8"): "Leave out --mesh.",
    ("price", "own.py:matmul", "--seq", "128", "--unroll"): "Leave out --seq and --unroll.",
    ("price", "own.py:matmul", "--batch", "8", "--dtype", "float32"): "--dtype and --batch",
    ("price", "own.py:state", "--mesh", "data=8", "--rules", "in=data"): "returns (step, args)",
    ("price", "own.py:swapped"): "does not begin with the step. Return (step, args)",
    ("price", "own.py:alone"): "gives alone_step alone, and what it is called with is needed too",
    ("price", "own.py:of_width", "--mesh", "data=8"): "'width'. Give its arguments too: own.py:of_",
    ("plan", "own.py:matmul", "--mesh", "data=8"): "gives a step with its arguments",
    ("price", SMALL, "--mesh", "data=8", "--batch", "0"): "--batch must be at least 1",
    ("price", SMALL, "--mesh", "data=8", "--batch", "x"): "invalid int value",
    ("price", SMALL, "--mesh", "data=8", "--remat", "dotz"): "dotz",
    ("price", SMALL, "--mesh", "data=8", "--optimizer", "adamm"): "Did you mean adam",
    ("price", SMALL, "--mesh", "data=8", "--limit", "much"): "Write for instance 80GB",
    ("price", SMALL, "--mesh", "data=8", "--bandwidth", "25GB"): "data=25GB,model=450GB",
    ("price", SMALL, "--mesh", "data=8", "--bandwidth", "rows=1GB"): "has no mesh axis rows",
    ("price", SMALL, "--mesh", "data=8", "--bandwidth", "data=fast"): "Write for instance 80GB",
    ("price", SMALL, "--mesh", "data=8", "--topology", "v5e:3x3"): "v5e:3x3",
    ("price", SMALL, "--mesh", "data=8", "--topology", "v5e:4x4"): "has 8 devices, and topology",
    ("price", SMALL, "--mesh", "data=8", "--target-config", "h100"): "--topology gpu:4x8",
    ("price", "own.py:build", "--mesh", "data=8", "--rules", "in=data"): "returns (step, args)",
    ("lock", SMALL, "--mesh", "data=8"): "one of the arguments --out --check is required",
    ("lock", "own.py:matmul", "--check", "absent.json"): "there is no sharding lock at absent",
    ("lock", "own.py:matmul", "--out", "a", "--check", "b"): "not allowed with argument",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, shell):
    status, printed, errors = shell(*arguments)
    assert (status, printed) == (2, "")
    assert MISTAKES[arguments] in errors
    *progress, error = errors.splitlines()
    assert error.startswith("penzai-shard: ")
    assert all(line.startswith("penzai-shard: compiling") for line in progress)


def test_sizes_are_read_in_powers_of_1000_and_of_1024():
    assert read_bytes("80GB", "x") == 80 * 10**9
    assert read_bytes("15.75 GiB", "x") == int(15.75 * 2**30)
    assert read_bytes("1e3", "x") == 1000
    assert read_bandwidths("data=1GB/s") == {"data": 1e9}
    for wrong in ("", "GB", "-1", "0", "1iB", "80 gigs"):
        with pytest.raises(RuleTypeError, match="is not a size"):
            read_bytes(wrong, "x")
    for wrong in ("", "data", "data=1,data=2", "=3"):
        with pytest.raises(RuleTypeError, match="cannot read --bandwidth"):
            read_bandwidths(wrong)
