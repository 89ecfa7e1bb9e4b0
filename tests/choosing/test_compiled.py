"""Candidates priced by compiled steps: one and two blocks against all of them, and paper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penzai_shard.choosing import compiled
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.compiled import compile_candidates
from penzai_shard.choosing.shallow import Cut
from penzai_shard.errors import CompilationError, PlanError
from penzai_shard.layouts.layout import Layout
from tests.choosing.models import mlp_weights, read_llama, read_weights
from tests.refusals import problem_paths

BLOCKS, BATCH, SEQ = 4, 16, 32
SIZES = {"embedding": 32, "heads": 4, "projection": 8, "neurons": 64, "vocabulary": 128}
SPLIT = {"neurons": "model", "heads": "model"}
TENSOR = Layout(parameters=SPLIT, compute={"batch": "data", **SPLIT})
LAYOUTS = {
    "two_dimensional": Layout.two_dimensional(min_size=1),
    "fully sharded, again": Layout.fully_sharded(
        data=("data", "model"), min_size=1, reshard_after_forward=True
    ),
    "sequence": dataclasses.replace(
        TENSOR, between_blocks={"batch": "data", "seq": "model"}, rematerialise="dots"
    ),
    "optimizer": dataclasses.replace(
        TENSOR, optimizer={**SPLIT, "embedding": "data"}, rematerialise="nothing"
    ),
}
MESH = (("data", 4), ("model", 2))


@functools.cache
def workload(blocks=BLOCKS, **options):
    return read_llama(BATCH, SEQ, blocks=blocks, **SIZES, **options)


@functools.cache
def cost_of(name, whole=False):
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(compiled, "cut_model", lambda workload: Cut((workload.model,), 1))
        return compile_candidates(workload(), [Candidate(MESH, LAYOUTS[name])])[0]


# A gradient that is scattered, and activations between blocks.
@pytest.mark.parametrize("name", ["fully sharded, again", "sequence"])
def test_one_and_two_blocks_say_what_all_cost(name):
    cost, whole = cost_of(name), cost_of(name, whole=True)
    assert cost.flops == whole.flops
    assert cost.traffic == pytest.approx(whole.traffic, rel=0.03)
    assert all(count > 0 for count in whole.traffic.values())
    for part in ("parameters", "optimizer", "inputs"):
        assert cost.memory[part] == whole.memory[part]
    assert cost.memory_bytes == pytest.approx(whole.memory_bytes, rel=0.12)


def count_products(again):
    """Operations of all devices on paper."""
    tokens, width, inner, neurons = BATCH * SEQ, SIZES["embedding"], 4 * 8, SIZES["neurons"]
    block = tokens * width * (4 * inner + 3 * neurons) + 2 * tokens * SEQ * inner
    # Forward once, backward twice; what is computed again leaves out the last product.
    every = BLOCKS * (3 * block + again * (block - tokens * neurons * width))
    return 2 * (every + 3 * tokens * width * SIZES["vocabulary"])


@pytest.mark.parametrize(("name", "again"), [("two_dimensional", 0), ("optimizer", 1)])
def test_flops_are_those_of_the_products_of_the_model(name, again):
    found, vocabulary = cost_of(name).flops * 8, 6 * BATCH * SEQ * 32 * 128
    # Without a rule for the vocabulary each device of a group computes all logits of its examples.
    whole_logits = vocabulary * (name == "optimizer")
    assert found == count_products(again) + whole_logits


def test_what_is_sent_says_what_it_is():
    sent = cost_of("two_dimensional").sent
    # Of neurons split in two, three of four parts of 32 x 64 floats, in each block twice.
    part = BLOCKS * 3 / 4 * 32 * 64 * 4 / 2
    for what in ("parameter", "gradient"):
        assert sent[what, ("data",)] >= 3 * part
    # Layers give each other activations, and their gradients.
    assert {what for what, axes in sent if axes == ("model",)} == {"activation"}


def compile_plain(loss, weights, x, **rules):
    layout = Layout(parameters=rules, compute={"batch": "data", **rules}, blocks=())
    (cost,) = compile_candidates(read_weights(loss, weights, x), [Candidate(MESH, layout)])
    return cost


def test_of_a_function_gradients_are_told_from_what_is_passed_on():
    def loss(w, tokens):
        x = w["table"][tokens]
        return ((x + jax.nn.gelu(x @ w["up"]) @ w["down"]) ** 2).mean()

    weights = {"table": {"vocabulary": 40, "embedding": 32}, **mlp_weights(32, 64)}
    tokens = jax.ShapeDtypeStruct((16, 12), "int32")
    cost = compile_plain(loss, weights, tokens, neurons="model")
    # In a ring of four 3/2 of what is summed; two of three are split in two.
    gradients = {axes: count for (what, axes), count in cost.sent.items() if what == "gradient"}
    assert gradients == {("data",): 3 / 2 * 4 * (40 * 32 + 32 * 32 + 32 * 32)}


def test_flops_of_convolutions_leave_out_what_lies_between_elements():
    def loss(w, x):
        for path in ("first", "second"):
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, w[path], (2, 2), "VALID", None, None, dims)
        return (x**2).mean()

    taps = {"rows": 2, "columns": 2}
    weights = {"first": taps | {"in": 4, "mid": 8}, "second": taps | {"mid": 8, "out": 16}}
    cost = compile_plain(loss, weights, np.ones((8, 16, 16, 4), "f4"))
    first, second = 2 * (8 * 8 * 8) * (2 * 2 * 4 * 8), 2 * (8 * 4 * 4) * (2 * 2 * 8 * 16)
    # Images have no gradient. Over the model axis nothing is split.
    assert cost.flops * 4 == 2 * first + 3 * second


def test_flops_in_a_loop_count_as_often_as_it_runs():
    def loss(w, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w["w"])
        return (x**2).mean()

    weights = {"w": {"layers": 6, "embedding": 16, "out": 16}}
    cost = compile_plain(loss, weights, np.ones((8, 16), "f4"))
    assert cost.flops * 4 == 3 * 6 * 2 * 8 * 16 * 16


def test_bfloat16_is_sent_and_held_as_such():
    layout = Candidate(MESH, LAYOUTS["two_dimensional"])
    dtypes = ({}, {"parameter_dtype": jnp.bfloat16, "activation_dtype": jnp.bfloat16})
    full, half = (compile_candidates(workload(1, **own), [layout])[0] for own in dtypes)
    assert half.flops == full.flops
    # Logits are in float32, and so may be what makes them.
    logits = 3 / 4 * SIZES["embedding"] * SIZES["vocabulary"] / 8 * 4
    for what in ("parameter", "gradient"):
        sent = [cost.sent[what, ("data",)] for cost in (full, half)]
        assert sent[0] / 2 <= sent[1] <= sent[0] / 2 + 2 * logits
    assert half.memory["activations"] < 0.75 * full.memory["activations"]


def test_what_is_computed_again_is_not_held():
    layouts = (Layout.fully_sharded(("data", "model"), rematerialise=x) for x in (None, "nothing"))
    every, again = compile_candidates(workload(12), [Candidate(MESH, each) for each in layouts])
    assert again.memory["activations"] < 0.25 * every.memory["activations"]


def dense_workload():
    weights, x = {"w": {"neurons": 16, "embedding": 8}}, np.ones((1024, 8), "f4")
    return read_weights(lambda w, x: ((x @ w["w"].T) ** 2).mean(), weights, x)


def test_more_devices_than_there_are_are_simulated():
    layout = Layout(parameters={"neurons": "model"}, compute={"batch": "data"}, blocks=())
    sizes = (("data", 64), ("model", 8))
    assert np.prod([size for _, size in sizes]) > len(jax.devices())
    (cost,) = compile_candidates(dense_workload(), [Candidate(sizes, layout)])
    assert cost.memory["inputs"] == 1024 // 64 * 8 * 4
    assert cost.traffic["data",] >= 2 * 63 / 64 * 2 * 8 * 4


def test_a_candidate_that_cannot_be_laid_out_is_refused():
    layout = Layout(parameters={"embedding": ("data", "model")}, compute={"batch": "data"})
    candidate = Candidate((("data", 2), ("model", 8)), layout)
    call = compile_candidates, dense_workload(), [candidate]
    assert problem_paths(PlanError, *call) == ["w"]


def test_what_the_compiler_says_is_an_error_of_ours(monkeypatch):
    def refuse(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(compiled.compiler, "compile_bytecode", refuse)
    layout = Layout(parameters={}, compute={"batch": "data"}, blocks=())
    (error,) = compile_candidates(dense_workload(), [Candidate((("data", 8),), layout)])
    assert isinstance(error, CompilationError)
    assert "INTERNAL: no" in str(error)
