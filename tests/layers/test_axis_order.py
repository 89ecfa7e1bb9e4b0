"""KeepAxisOrder: the same values, and no array of activations is moved.

That as few bytes are moved as by hand is among the claims for layouts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

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
