"""Dimensions of weights are one axis where an operation ties them, never by their length."""

import collections

import jax
import jax.numpy as jnp
import pytest
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as llama

import penzai_shard as pzs
from penzai_shard.naming.trace import trace_call


def classes_by_path(function, params, *inputs, **options):
    call = trace_call(function, params, *inputs, **options)
    return {weight.path: weight.classes for weight in call.weights}


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_classes_of_a_transformer_never_join_two_of_its_axes():
    # All lengths that could be mixed up are equal.
    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=4, query_head_multiplier=1, embedding_dim=16, projection_dim=4,
        mlp_hidden_dim=16, num_decoder_blocks=2, vocab_size=16, mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )  # fmt: skip
    model = pzs.abstract_model(llama.build_llamalike_transformer, config, jax.random.key(0))
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
    def run(params, x):
        if is_scanned:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None), x, params)[
                0
            ]
        for layer in range(3):
            x = jnp.tanh(x @ params["up"][layer]) @ params["down"][layer]
        return x

    weights = {"up": struct(3, 4, 4), "down": struct(3, 4, 4)}
    found = classes_by_path(run, weights, struct(2, 4), input_names=(("batch", None),))
    (_, embedding, neurons), (_, back, out) = found["up"], found["down"]
    assert (neurons, out) == (back, embedding)
    assert neurons is not embedding
