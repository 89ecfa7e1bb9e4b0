"""``penzai-shard why`` as a shell sees it."""

import json

import pytest

from penzai_shard.cli import asked_steps
from penzai_shard.inspection.steps import programs
from penzai_shard.training import TrainStep

SMALL = (
    "llama-3-8b(num_hidden_layers=3, hidden_size=64, intermediate_size=128, vocab_size=256, "
    "num_attention_heads=4, num_key_value_heads=2)"
)
TRAINED = ("why", SMALL, "--mesh", "data=4,model=2", "--batch", "8", "--seq", "16")


@pytest.fixture(scope="module")
def lowered():
    """The one training step that is lowered here."""
    return []


@pytest.fixture(autouse=True)
def lowered_once(lowered, monkeypatch):
    lower_step = asked_steps.lower_step

    def remembered(step, *arguments):
        if not isinstance(step, TrainStep):
            return lower_step(step, *arguments)
        if not lowered:
            lowered.append(lower_step(step, *arguments))
        return lowered[0]

    monkeypatch.setattr(asked_steps, "lower_step", remembered)


@pytest.fixture(autouse=True)
def never_compiled(monkeypatch):
    def refused(*arguments):
        raise AssertionError("why compiles nothing")

    monkeypatch.setattr(programs, "compile_bytecode", refused)


def test_a_model_is_explained_narrowed_to_a_layer(shell):
    status, printed, errors = shell(*TRAINED, "--at", "transformer/blocks/mlp", "--json")
    assert status == 0
    assert errors.startswith("penzai-shard: tracing one training step of batch 8 x 16 tokens")
    found = json.loads(printed)["why"]
    (up,) = [row for row in found["rows"] if row["label"].endswith("mlp/gating_linear")]
    assert up["spec"] == [["data"], [], ["model"]]
    assert [cause["rule"] for cause in up["causes"]] == [
        "'batch' -> 'data'",
        "'neurons' -> 'model'",
    ]


def test_a_step_of_ones_own_is_explained_as_a_table(shell):
    status, printed, _ = shell("why", "own.py:matmul")
    assert status == 0
    assert "model lost at" not in printed
    assert "0 of 1 result split" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*TRAINED, "--at", "transformer/blocks/mpl"), "Did you mean 'transformer/blocks/mlp'?"),
        (("why", SMALL), "the mesh is needed too"),
        ((*TRAINED, "--topology", "cpu:8"), "unknown argument '--topology'"),
    ],
)
def test_mistakes_end_with_exit_status_2_and_a_fix(shell, arguments, message):
    status, _, errors = shell(*arguments)
    assert status == 2
    assert message in " ".join(errors.split())


def test_a_model_without_a_valid_layout_is_exit_status_1(shell):
    arguments = ("why", SMALL, "--mesh", "data=4,model=3", "--layout", "two_dimensional")
    status, printed, _ = shell(*arguments)
    assert status == 1
    assert "NO VALID LAYOUT" in printed
