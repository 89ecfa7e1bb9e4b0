"""Layers of Penzai's first API between an effect and its handler, in every wrapper."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.deprecated.v1.example_models import gemma

from penzai_shard.layers import Checkpointed, InPrecision, Jitted, Scoped

WRAPPERS = {
    "Jitted": Jitted,
    "Checkpointed": Checkpointed,
    "Scoped": lambda body: Scoped(body, "scope"),
    "InPrecision": lambda body: InPrecision(body, "float32"),
    "nested": lambda body: Jitted(Checkpointed(Jitted(body))),
}


@pytest.fixture(params=WRAPPERS)
def wrap(request):
    return WRAPPERS[request.param]


def gemma_model():
    definition = gemma.model_core.GemmaTransformer.from_config(
        gemma.model_core.GemmaTransformerConfig(
            num_heads=2,
            embedding_dim=8,
            projection_dim=4,
            single_kv_head=True,
            mlp_hidden_dim=16,
            num_decoder_blocks=1,
            vocab_size=11,
            parameter_dtype=jnp.float32,
            activation_dtype=jnp.float32,
        )
    )
    return pz_v1.nn.initialize_parameters(definition, jax.random.key(0))


@jax.jit
def two_chunks(model):
    """The logits of two calls of the cached model; the second reads what the first cached."""
    sampler, state = gemma.sampling_mode.GemmaKVCachingTransformer.from_uncached(
        model, cache_len=4, batch_axes={"batch": 2}
    )
    outputs = []
    for chunk in ([[1, 2], [3, 4]], [[5, 6], [7, 8]]):
        tokens = pz.nx.wrap(jnp.asarray(chunk), "batch", "seq")
        inputs = gemma.sampling_mode.GemmaKVCachingInputs.from_basic_subsegments(tokens, state)
        logits, state = sampler(inputs)
        outputs.append(logits.unwrap("batch", "seq", "vocabulary"))
    return jnp.stack(outputs)


@pytest.fixture(scope="module")
def model():
    return gemma_model()


def test_a_key_value_cache_outside_of_the_wrapper(wrap, model):
    blocks = pz.select(model).at_instances_of(gemma.model_core.GemmaTransformerBlock)
    wrapped = blocks.apply(wrap)
    np.testing.assert_allclose(two_chunks(wrapped), two_chunks(model), rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def cached(model):
    """A model with a cache, its inputs, and what it computes."""
    sampler, state = gemma.sampling_mode.GemmaKVCachingTransformer.from_uncached(
        model, cache_len=4, batch_axes={"batch": 2}
    )
    tokens = pz.nx.wrap(jnp.asarray([[1, 2], [3, 4]]), "batch", "seq")
    inputs = gemma.sampling_mode.GemmaKVCachingInputs.from_basic_subsegments(tokens, state)
    return sampler, inputs, jax.jit(lambda layer, x: layer(x))(sampler, inputs)


def test_around_a_model_with_a_cache(wrap, cached):
    sampler, inputs, expected = cached
    actual = wrap(wrap(sampler))(inputs)
    assert jax.tree_util.tree_structure(actual) == jax.tree_util.tree_structure(expected)
    for ours, theirs in zip(*map(jax.tree_util.tree_leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pz.pytree_dataclass
class Writes(pz_v1.Layer):
    """Writes to two side outputs in turns."""

    first: pz_v1.de.SideOutputEffect = dataclasses.field(
        default_factory=lambda: pz_v1.de.SideOutputRequest(tag="first")
    )
    second: pz_v1.de.SideOutputEffect = dataclasses.field(
        default_factory=lambda: pz_v1.de.SideOutputRequest(tag="second")
    )

    def __call__(self, argument: Any) -> Any:
        self.first.tell(argument)
        self.second.tell(argument + 1)
        self.first.tell(argument + 2)
        return argument * 2


def test_side_outputs_keep_their_order(wrap):
    def outcome(inner):
        model = pz_v1.de.CollectingSideOutputs.handling(
            pz_v1.nn.Sequential([Writes(), inner(Writes()), inner(Writes())])
        )
        value, outputs = model(jnp.asarray(1.0))
        return float(value), [(output.tag, float(output.value)) for output in outputs]

    assert outcome(wrap) == outcome(lambda layer: layer)
    assert outcome(wrap)[1][3:6] == [("first", 2.0), ("second", 3.0), ("first", 4.0)]


def test_one_program_serves_calls_with_other_side_inputs_and_state():
    traced = []

    @pz.pytree_dataclass
    class Adds(pz_v1.Layer):
        offset: pz_v1.de.SideInputEffect = dataclasses.field(
            default_factory=lambda: pz_v1.de.SideInputRequest(tag="offset")
        )

        def __call__(self, argument: Any) -> Any:
            traced.append(1)
            return argument + self.offset.ask()

    model = pz_v1.de.WithSideInputsFromInputTuple.handling(Jitted(Adds()), tags=["offset"])
    outputs = [float(model((jnp.asarray(1.0), jnp.asarray(offset)))) for offset in (1.0, 2.0, 3.0)]
    assert outputs == [2.0, 3.0, 4.0]
    assert len(traced) == 1
