"""Dimensions of weights are one axis where an operation ties them, never by their length."""

import collections
import itertools
import math
import tracemalloc

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st
from penzai import pz

import penzai_shard as pzs
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
