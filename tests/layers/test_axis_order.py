"""KeepAxisOrder: the same values, and no array of activations is moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

import penzai_shard as pzs
from penzai_shard import programs
from tests.models import llama

TOKENS = pz.nx.wrap(jnp.arange(24).reshape(4, 6) % 16, "batch", "seq")
LLAMAS = [{"kv_heads": 1}, {}, {"multiplier": 1, "tied": True}, {"stacked": True}]


@pytest.mark.parametrize("options", LLAMAS, ids=str)
def test_keep_axis_order_moves_nothing_and_keeps_values(options):
    rolls = pzs.roll_layer_stacks() if "stacked" in options else pzs.Recipe()
    bare = rolls.apply(llama(blocks=1, **options))
    kept = pzs.keep_axis_order().apply(bare)
    outputs = []
    for model in (bare, kept):
        program = jax.make_jaxpr(pz.freeze_variables(model))(TOKENS)
        found = {equation.primitive.name for equation in programs.equations_in(program)}
        assert ("transpose" in found) is (model is bare)
        outputs.append(pzs.Jitted(model)(TOKENS).unwrap("batch", "seq", "vocabulary"))
    np.testing.assert_allclose(*outputs, atol=1e-5)
    assert pzs.strip(kept) == pzs.strip(bare)


def run_by_hand(arrays, x):
    """A block of the llama without positions, on raw arrays."""
    scale, q, k, v, o, scale_2, gate, up, down = arrays
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    query, key, value = (jnp.einsum("bse,ehp->bshp", normal, w) for w in (q, k, v))
    logits = jnp.einsum("bshp,bthp->bhst", query * q.shape[2] ** -0.5, key)
    logits = jnp.where(jnp.tri(x.shape[1], dtype=bool), logits, -1e38)
    attended = jnp.einsum("bhst,bthp->bshp", jax.nn.softmax(logits), value)
    x = x + jnp.einsum("bshp,hpe->bse", attended, o)
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale_2
    return x + (jax.nn.silu(normal @ gate) * (normal @ up)) @ down


def test_keep_axis_order_of_a_block_moves_as_few_bytes_as_by_hand():
    blocks = pz.select(llama(multiplier=1)).at_instances_of(TransformerBlock).get_sequence()
    block = pz.select(blocks[0]).at_instances_of(pz.nn.ApplyRoPE).remove_from_parent()
    x = jax.random.normal(jax.random.key(0), (4, 32, 8))
    named = pz.nx.wrap(x, "batch", "seq", "embedding")
    slots, values = pz.unbind_params(block, freeze=True)

    def measure(run):
        step = jax.value_and_grad(lambda values: jnp.sum(run(values) ** 2))
        compiled = jax.jit(step).lower(values).compile()
        return float(compiled(values)[0]), compiled.cost_analysis()["bytes accessed"]

    def run(recipe, values):
        layer = recipe.apply(pz.bind_variables(slots, values))
        positions = pz.nx.wrap(jnp.arange(32), "seq")
        return layer(named, token_positions=positions).unwrap(*named.named_shape)

    by_hand = measure(lambda values: run_by_hand([v.value.data_array for v in values], x))
    recipes = pzs.Recipe(), pzs.keep_axis_order()
    bare, kept = (measure(functools.partial(run, recipe)) for recipe in recipes)
    np.testing.assert_allclose([bare[0], kept[0]], by_hand[0], rtol=1e-5)
    assert kept[1] < 1.01 * by_hand[1] < bare[1]
