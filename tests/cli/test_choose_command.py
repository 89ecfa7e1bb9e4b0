"""``penzai-shard choose`` as a shell sees it."""

import json

import pytest

from penzai_shard.choosing.choices import stages
from penzai_shard.cli import choose_command
from penzai_shard.layouts import Layout

SMALL = (
    "llama-3-8b(num_hidden_layers=4, hidden_size=64, intermediate_size=128, vocab_size=256, "
    "num_attention_heads=4, num_key_value_heads=2)"
)
ASKED = (
    *("choose", SMALL, "--devices", "v5e:8", "--batch", "16", "--seq", "32", "--compiled", "0"),
    *("--propagated", "4"),
    *("--mesh", "data=4,model=2", "--keep", "neurons=model"),
)


@pytest.fixture(scope="module")
def chosen():
    """What was chosen, by what was asked, so that each question is answered once."""
    return {}


@pytest.fixture(autouse=True)
def chosen_once(chosen, monkeypatch):
    prices_of = stages.NamePrices.of

    def traced_once(problem):
        if "prices" not in chosen:
            chosen["prices"] = prices_of(problem)
        return chosen["prices"]

    monkeypatch.setattr(stages.NamePrices, "of", traced_once)
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
    assert "for batch 16 x seq 33 on 8 devices (v5e:2x4, mesh (data=4, model=2))" in text
    assert "It pays most for" in text
    assert "Against the pick +" in text
    assert "of all, 0 need more memory than there is" in text


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


def test_a_mesh_and_what_is_kept_are_followed(shell):
    status, printed, _ = shell(*ASKED, "--json")
    assert status == 0
    found = json.loads(printed)
    for one in found["choices"]:
        assert one["mesh"] == {"data": 4, "model": 2}
        assert "neurons" in one["layout"].partition(" over model")[0]
    assert "mesh (data=4, model=2)" in found["asked"]


def test_nothing_that_fits_is_exit_status_1_with_what_would_help(shell):
    arguments = (*ASKED, "--memory", "100KiB")
    status, printed, _ = shell(*arguments)
    assert status == 1
    text = " ".join(printed.split())
    assert "fits into 100.0 KiB of memory on each device. The nearest needs" in text
    assert "more devices:" in text
    assert "leave out keep={'neurons': ('model',)} and the mesh, devices=" in text
    status, printed, _ = shell(*arguments, "--json")
    found = json.loads(printed)
    assert (status, found["fits"]) == (1, False)
    assert any("more devices" in line for line in found["help"])


MISTAKES = {
    ("choose", SMALL, "--batch", "8"): "the following arguments are required: --devices",
    ("choose", SMALL, "--devices", "v5e:8"): "the following arguments are required: --batch",
    (*ASKED, "--devices", "v5x:8"): "'v5x' is not known. Did you mean",
    ("choose", SMALL, "--devices", "v5e", "--batch", "8"): "is not the name of hardware",
    (*ASKED, "--batch", "0"): "--batch must be at least 1, not 0",
    (*ASKED, "--memory", "lots"): "memory 'lots' is not a size",
    (*ASKED, "--optimizer", "adamv"): "Did you mean",
    (
        *ASKED,
        "--keep",
        "nuerons=model",
    ): "the model has no such logical axis. Did you mean 'neurons'",
    (*ASKED, "--keep", "neurons=modle"): "no mesh has mesh axis 'modle'. Did you mean 'model'",
    (*ASKED, "--keep", "batch:data"): "--keep 'batch:data': write batch=data.",
    (*ASKED, "--keep", "neurons"): "there is no 'neurons'",
    (*ASKED, "--keep", "fully_sharded()"): "write pairs of a logical axis and a mesh axis",
    (*ASKED, "--mesh", "data=2,model=2"): "has 8 devices, and there are 4. Give as many",
    ("choose", "llama-3-9b", *ASKED[2:]): "Did you mean llama-3-",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=MISTAKES.get)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, shell):
    status, printed, errors = shell(*arguments)
    lines = [line for line in errors.splitlines() if not line.endswith(" ...")]
    assert (status, printed) == (2, "")
    assert len(lines) == 1
    assert MISTAKES[arguments] in lines[0]
