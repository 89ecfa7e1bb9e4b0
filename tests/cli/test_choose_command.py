"""``penzai-shard choose`` as a shell sees it."""

import json

import pytest

from penzai_shard.choosing.choices import choice
from penzai_shard.cli import choose_command
from penzai_shard.layouts import Layout
from tests.choosing.traced_once import trace_once

SMALL = (
    "llama-3-8b(num_hidden_layers=4, hidden_size=64, intermediate_size=128, vocab_size=256, "
    "num_attention_heads=4, num_key_value_heads=2)"
)
ASKED = (
    *("choose", SMALL, "--devices", "v5e:8", "--batch", "16", "--seq", "32", "--compiled", "0"),
    *("--propagated", "2"),
    *("--mesh", "data=4,model=2", "--keep", "neurons=model"),
)


@pytest.fixture(scope="module")
def chosen():
    """What was chosen, by what was asked, so that each question is answered once."""
    return {}


@pytest.fixture(autouse=True)
def chosen_once(chosen, monkeypatch):
    trace_once(monkeypatch, chosen)
    choose_layout = choose_command.choose_layout

    def remembered(model, loss_fn, optimizer, **options):
        key = repr(sorted(options.items()))
        if key not in chosen:
            chosen[key] = choose_layout(model, loss_fn, optimizer, **options)
        return chosen[key]

    monkeypatch.setattr(choose_command, "choose_layout", remembered)


def test_the_best_layouts_are_printed_with_what_they_pay_for(shell):
    status, printed, errors = shell(*ASKED)
    assert status == 0
    assert errors.startswith("penzai-shard: choosing a layout of llama-3-8b(")
    text = " ".join(printed.split())
    assert "which reads 32 tokens of a sequence and predicts each next one" in text
    assert "for batch 16 x seq 33 on 8 devices (v5e:2x4, mesh (data=4, model=2))" in text
    assert "It pays most for" in text
    assert "than the pick, bound by " in text or "As fast as the pick" in text
    assert "none needs more memory than there is" in text
    assert "What is compiled has a better one: --compiled 12." in text


def test_the_answer_for_programs_has_every_figure(shell):
    status, printed, _ = shell(*ASKED, "--json")
    found = json.loads(printed)
    assert status == 0
    assert found["devices"] == 8
    assert found["model"].startswith("llama-3-8b(")
    best = found["choices"][0]
    assert best["seconds"]["bound"] == min(one["seconds"]["bound"] for one in found["choices"])
    assert best["memory"]["total"] <= found["memory_limit"]
    assert found["counts"]["names"] == len(found["priced"]) > 100
    assert any(note.endswith("better one: --compiled 12.") for note in found["notes"])


def test_the_best_is_written_and_priced_from_the_file(shell, tmp_path):
    status, printed, errors = shell(*ASKED, "--write", "rules.toml", "--json")
    assert status == 0
    assert "the best is in rules.toml" in errors
    best = json.loads(printed)["choices"][0]
    found = Layout.read_toml(tmp_path / "rules.toml")
    assert found.mesh_shape == best["mesh"]
    assert found.microbatches == best["microbatches"]
    status, printed, _ = shell("plan", SMALL, "--rules", "rules.toml", "--json")
    assert status == 0
    assert json.loads(printed)["mesh"] == best["mesh"]


def test_what_was_found_is_told_where_it_cannot_be_written(shell, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(choice, "write_whole", full)
    status, printed, errors = shell(*ASKED, "--write", "rules.toml")
    assert status == 2
    assert "It pays most for" in " ".join(printed.split())
    assert errors.endswith("OSError: [Errno 28] No space left on device\n")


def test_padding_is_asked_for_written_to_the_file_and_read_from_it(shell, tmp_path):
    over_three = (*ASKED, "--devices", "h100:6", "--mesh", "data=2,model=3", "--propagated", "0")
    vocabulary = (*over_three, "--keep", "vocabulary=model")
    status, printed, _ = shell(*vocabulary)
    assert status == 1
    assert "(3); --on-indivisible pad would store it as 258" in " ".join(printed.split())
    status, printed, _ = shell(*vocabulary, "--on-indivisible", "pad", "--write", "rules.toml")
    assert status == 0
    assert "padded: vocabulary 256 to 258" in " ".join(printed.split())
    said = (tmp_path / "rules.toml").read_text()
    assert '\non_indivisible = "pad"\n' in said
    # Commands that read the file need not be told; what they are told counts.
    plan = ("plan", SMALL, "--rules", "rules.toml")
    status, printed, _ = shell(*plan, "--json")
    assert (status, json.loads(printed)["on_indivisible"]) == (0, "pad")
    status, printed, _ = shell(*plan, "--on-indivisible", "error")
    assert status == 1
    assert "Or store it padded: --on-indivisible pad." in " ".join(printed.split())


def test_a_mesh_and_what_is_kept_are_followed(shell):
    status, printed, _ = shell(*ASKED, "--json")
    assert status == 0
    found = json.loads(printed)
    for one in found["choices"]:
        assert one["mesh"] == {"data": 4, "model": 2}
        assert "neurons" in one["layout"].partition(" over model")[0]
    assert "mesh (data=4, model=2)" in found["asked"]


def test_nothing_that_fits_is_exit_status_1_with_what_would_help(shell):
    arguments = (*ASKED, "--memory", "100KiB", "--propagated", "0")
    status, printed, _ = shell(*arguments)
    assert status == 1
    text = " ".join(printed.split())
    assert "fits into 100.0 KiB of memory on each device. The nearest needs" in text
    assert "more devices:" in text
    assert "leave out --keep neurons=model and --mesh." in text
    status, printed, _ = shell(*arguments, "--json")
    found = json.loads(printed)
    assert (status, found["fits"]) == (1, False)
    assert any("more devices" in line for line in found["help"])
    assert any(
        line.endswith("leave out --keep neurons=model and --mesh.") for line in found["help"]
    )


def test_pairs_that_leave_no_layout_are_told_as_the_shell_takes_them(shell):
    status, printed, _ = shell(*ASKED, "--keep", "neurons=model,batch=data+model,heads=none")
    assert status == 1
    advice = "Leave out --keep neurons=model or --keep batch=data+model."
    assert advice in " ".join(printed.split())
    none = ("--keep", "neurons=model,batch=data+model", "--json")
    status, printed, _ = shell(*ASKED, *none)
    assert json.loads(printed)["problem"].endswith(advice)


def test_what_a_function_says_itself_is_told_as_it_says_it(shell, tmp_path):
    (tmp_path / "kept.py").write_text(KEPT)
    asked = ("choose", "kept.py:problem", "--devices", "h100:2", "--propagated", "0")
    status, printed, _ = shell(*asked, "--compiled", "0", "--memory", "20KiB")
    assert status == 1
    assert "leave out keep={'neurons': None}." in " ".join(printed.split())


KEPT = """
import jax, optax
from penzai import pz
import penzai_shard as pzs

def loss_fn(model, rng, state, x):
    return (model(x).untag("batch", "neurons") ** 2).mean().unwrap(), state, {}

def problem():
    sizes = {"embedding": 128}, {"neurons": 128}
    return {
        "model": pzs.abstract_model(
            lambda: pz.nn.Linear.from_config("up", jax.random.key(0), *sizes)
        ),
        "loss_fn": loss_fn,
        "optimizer": optax.sgd(0.1),
        "batch": {"x": pz.nx.ones({"batch": 4, "embedding": 128})},
        "keep": {"neurons": None},
    }
"""


MISTAKES = {
    ("choose", SMALL): "the following arguments are required: --devices, --batch. Add for instance "
    "--devices v5e:32 --batch 32.",
    (
        "choose",
    ): "required: MODEL, --devices, --batch. Add for instance llama-3-8b --devices v5e:32 ",
    ("choose", "train.py:problem"): "required: --devices. Add for instance --devices v5e:32. ",
    ("choose", SMALL, "--batch", "8"): "the following arguments are required: --devices",
    ("choose", SMALL, "--devices", "v5e:8"): "the following arguments are required: --batch",
    (*ASKED, "--devices", "v5x:8"): "'v5x' is not known. Did you mean",
    ("choose", SMALL, "--devices", "v5e", "--batch", "8"): "is not the name of hardware",
    (*ASKED, "--batch", "0"): "--batch must be at least 1, not 0",
    (*ASKED, "--memory", "lots"): "memory 'lots' is not a size",
    (*ASKED, "--optimizer", "adamv"): "Did you mean",
    (*ASKED, "--write", "."): "is a folder",
    (*ASKED, "--write", f"{__file__}/rules.toml"): "test_choose_command.py is a file and no folder",
    (
        *ASKED,
        "--keep",
        "nuerons=model",
    ): "the model has no such logical axis. Did you mean 'neurons'",
    (*ASKED, "--keep", "neurons=modle"): "--keep neurons: no mesh has mesh axis 'modle'. Did you ",
    (*ASKED, "--keep", "batch:data"): "--keep 'batch:data': write batch=data.",
    (*ASKED, "--keep", "{'batch': 'data'}"): ": write batch=data.",
    (*ASKED, "--keep", "neurons"): "--keep 'neurons': write pairs of a logical axis and a mesh",
    (*ASKED, "--keep", "fully_sharded()"): "write pairs of a logical axis and a mesh axis",
    (*ASKED, "--mesh", "data=2,model=2"): "has 8 devices, and there are 4. Give as many, "
    "or its kind alone: --devices v5e.",
    (*ASKED, "--compiled", "-1"): "Write --compiled 12, or --compiled 0 for none.",
    ("choose", "llama-3-9b", *ASKED[2:]): "Did you mean llama-3-",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=MISTAKES.get)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, shell):
    status, printed, errors = shell(*arguments)
    lines = [line for line in errors.splitlines() if not line.endswith(" ...")]
    assert (status, printed) == (2, "")
    assert len(lines) == 1
    assert MISTAKES[arguments] in lines[0]
