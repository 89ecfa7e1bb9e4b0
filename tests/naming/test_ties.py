"""Dimensions of weights are one axis where an operation ties them, never by their length."""

import collections
import itertools
import math
import tracemalloc

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penzai import pz

import penzai_shard as pzs
from penzai_shard.naming.cuts import cover
from penzai_shard.naming.facts import Facts
from penzai_shard.naming.ties import Ties
from penzai_shard.naming.trace import trace_call
from tests.layouts.transformers import build_llama


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_classes_of_a_transformer_never_join_two_of_its_axes():
    # All lengths that could be mixed up are equal.
    sizes = {"embedding": 16, "heads": 4, "projection": 4, "neurons": 16, "vocabulary": 16}
    model = pzs.abstract_model(build_llama, blocks=2, **sizes)
    tokens = jax.eval_shape(lambda: pz.nx.zeros({"batch": 2, "seq": 8}, dtype=int))
    call = trace_call(lambda model, x: model(x), model, tokens)
    names = collections.defaultdict(set)
    for weight in call.weights:
        for parts, name in zip(weight.parts, weight.names, strict=False):
            names[parts].add(name)
    assert {"embedding", "neurons", "vocabulary", "heads"} <= set().union(*names.values())
    assert [found for found in names.values() if len(found) > 1] == []


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_stack_has_the_same_ties_scanned_or_written_out(is_scanned):
    def turn(x, w):
        return jnp.tanh(x @ w["up"]) @ w["down"], None

    def run(params, x):
        if is_scanned:
            return jax.lax.scan(turn, x, params)[0]
        for layer in range(3):
            x, _ = turn(x, {path: w[layer] for path, w in params.items()})
        return x

    weights = {"up": struct(3, 4, 4), "down": struct(3, 4, 4)}
    call = trace_call(run, weights, struct(2, 4), input_names=(("batch", None),))
    found = {weight.path: weight.classes for weight in call.weights}
    (_, embedding, neurons), (_, back, out) = found["up"], found["down"]
    assert (neurons, out) == (back, embedding)
    assert neurons is not embedding


def attend(params, x):
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k))
    return jnp.einsum("bst,btd->bsd", scores, v) @ params["out"]


ATTENTION = {"qkv": struct(8, 24), "out": struct(8, 8)}
STREAM = {"input_names": (("batch", "seq", "embedding"),)}


def test_runs_of_one_weight_cover_it_and_are_the_axis_of_what_uses_them():
    call = trace_call(attend, ATTENTION, struct(2, 4, 8), **STREAM)
    found = {weight.path: weight.classes for weight in call.weights}
    (embedding, joined), (projection, out) = found["qkv"], found["out"]
    runs = Facts(call).runs[joined]
    assert [*runs] == [(0, 8), (8, 16), (16, 24)]
    assert cover(joined.size, runs)
    (_, queries), (_, keys), (_, values) = (run for (run,) in runs.values())
    # Scores contract queries and keys; values go on to the last product.
    assert (queries, values) == (keys, (projection,))
    assert len({embedding, projection, out, *queries}) == 4


def test_ties_of_a_long_flat_weight_take_no_memory_for_its_elements():
    def run(params, x):
        first, second = jnp.split(params, 2)
        return (first.reshape(2, -1) @ x).sum() + second.sum()

    tracemalloc.start()
    try:
        trace_call(run, struct(2**22), struct(2**20), input_names=[None])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24


def test_facts_of_products_and_lookups():
    def run(params, tokens):
        return attend(params, params["table"][tokens]) @ params["head"]

    weights = {**ATTENTION, "table": struct(16, 8), "head": struct(8, 16)}
    call = trace_call(run, weights, struct(2, 4, dtype="int32"))
    found, facts = {weight.path: weight.classes for weight in call.weights}, Facts(call)
    (lookup,) = facts.lookups
    assert (lookup.rows, lookup.others) == (found["table"][0], {found["table"][1]})
    contracted = [each.contracted for each in facts.with_weights]
    assert contracted == [{found[path][0]} for path in ("qkv", "out", "head")]
    assert len(facts.products) == 5


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_unify_makes_any_grouping_of_factors_their_product(factors, data):
    ties = Ties()
    whole, elements = ties.new(math.prod(factors)), [*map(ties.new, factors)]
    ends = {*data.draw(st.sets(st.integers(1, len(factors)))), 0, len(factors)}
    groups = [
        ties.new(math.prod(factors[start:end])) for start, end in itertools.pairwise(sorted(ends))
    ]
    assert ties.unify([whole], groups)
    assert ties.unify(elements, [whole])
    assert ties.parts([whole]) == ties.parts(elements) == ties.parts(groups)
    assert [ties.sizes[part] for part in ties.parts([whole])] == [f for f in factors if f > 1]


def test_unify_leaves_lengths_apart_that_are_no_parts_of_one_another():
    ties = Ties()
    first, second = [ties.new(4), ties.new(6)], [ties.new(6), ties.new(4)]
    assert not ties.unify(first, second)
    assert len({*ties.parts(first), *ties.parts(second)}) == 4
