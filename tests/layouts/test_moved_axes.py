"""A model in a layout does not move its arrays around in memory."""

import jax
import jax.numpy as jnp
import pytest
from penzai import pz

from penzai_shard import Layout, make_mesh
from penzai_shard.traced_programs import equations
from tests.model_families import drawn_transformer

TOKENS = pz.nx.wrap(jnp.arange(8 * 4).reshape(8, 4) % 16, "batch", "seq")
LAYOUTS = {
    "data parallel": Layout.data_parallel(),
    "gathered again": Layout.fully_sharded(min_size=64, reshard_after_forward=True),
}


def transposes(model):
    program = jax.make_jaxpr(pz.freeze_params(model))(TOKENS)
    return [eqn for eqn in equations(program) if eqn.primitive.name == "transpose"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_in_a_layout_transposes_nothing(name):
    mesh = make_mesh({"data": 8})
    bare = drawn_transformer("llama")
    edited = LAYOUTS[name].recipe(bare, mesh).apply(bare)
    assert transposes(bare)
    assert not transposes(edited)
