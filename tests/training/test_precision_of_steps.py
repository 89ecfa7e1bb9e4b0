"""Train steps that compute in half precision over float32 masters, laid out in parts."""

import collections
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard.layers import GatherParameters, InPrecision
from penzai_shard.layouts import Layout
from penzai_shard.meshes import make_mesh
from penzai_shard.training import TrainState, build_train_step_fn

MESH = {"data": 4, "model": 2}
RULES = {
    "fully_sharded": ({"embedding": "data"}, {"batch": "data"}),
    "tensor_parallel": ({"neurons": "model"}, {"batch": "data", "neurons": "model"}),
    "both": (
        {"embedding": "data", "neurons": "model"},
        {"batch": "data", "neurons": "model"},
    ),
}


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class Block(pz.nn.Sequential):
    """Two matrix products with a residual."""

    def __call__(self, argument, /, **side_inputs):
        return argument + super().__call__(argument, **side_inputs)


def build_model(dtype=None):
    key = jax.random.key(0)
    sizes = {"embedding": 16}, {"neurons": 32}
    model = Block(
        [
            pz.nn.Linear.from_config("up", key, *sizes),
            pz.nn.Elementwise(jax.nn.silu),
            pz.nn.Linear.from_config("down", key, *reversed(sizes)),
        ]
    )
    return model if dtype is None else InPrecision(model, dtype)


def laid_out(name):
    parameters, compute = RULES[name]
    return Layout(parameters=parameters, compute=compute, blocks=Block)


def loss_fn(model, rng, state, x):
    out = model(x)
    assert out.dtype == jnp.float32
    loss = jnp.mean(out.unwrap("batch", "embedding") ** 2)
    return loss, state, {"loss": loss}


def batch():
    return pz.nx.wrap(jnp.sin(jnp.arange(16 * 16.0)).reshape(16, 16), "batch", "embedding")


def dtypes_seen(seen):
    """An optimizer that writes down the dtype of the gradients that it gets."""

    def look(grads, _):
        seen.update(leaf.dtype for leaf in jax.tree.leaves(grads))
        return grads

    return optax.stateless(look)


@pytest.fixture(scope="module")
def exact():
    """Parameters after three steps in float32 on one device."""
    state = TrainState.initial_state(build_model(), optax.sgd(0.5), jax.random.key(0))
    step = build_train_step_fn(loss_fn)
    for _ in range(3):
        state, _ = step(state, x=batch())
    return state.params


@pytest.mark.parametrize(
    ("dtype", "layout", "explicit"),
    [
        ("bfloat16", "fully_sharded", False),
        ("bfloat16", "tensor_parallel", True),
        ("float16", "both", False),
    ],
)
def test_half_precision_over_float32_masters_gives_the_step_within_its_rounding(
    dtype, layout, explicit, exact
):
    mesh = make_mesh(MESH)
    if explicit:
        kinds = (jax.sharding.AxisType.Explicit,) * 2
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    seen = set()
    layout = laid_out(layout)
    state, step = layout.build(
        build_model,
        dtype,
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.chain(dtypes_seen(seen), optax.sgd(0.5)),
        rng=jax.random.key(0),
        accumulate_steps=2,
        skip_nonfinite=True,
        step_metrics=("gradient_norm", "skipped_steps"),
    )
    assert ("loss_scale" in state.guards) == (dtype == "float16")
    for _ in range(3):
        state, aux = step(state, x=layout.shard_batch(batch(), mesh))
    assert int(aux["skipped_steps"]) == 0
    assert seen == {jnp.dtype(jnp.float32)}
    for name, value in exact.items():
        found = state.params[name].data_array
        assert found.dtype == jnp.float32
        tolerance = {"bfloat16": 2e-2, "float16": 3e-3}[dtype]
        np.testing.assert_allclose(found, value.data_array, atol=tolerance)
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1


def gathered_bytes(text):
    """Bytes that are gathered, by dtype."""
    found = collections.Counter()
    for dtype, sizes in re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text):
        found[dtype] += int(np.prod([int(n) for n in sizes.split(",")]))
    return found


def test_parameters_are_gathered_after_they_were_cast(tmp_path):
    """In the partitioned program: on CPU later passes make collectives wider again."""
    mesh = make_mesh({"data": 8})
    layout = laid_out("fully_sharded")
    # A program of its own each time, as one from a cache would not be written down.
    salt = random.random()

    def loss(model, rng, state, x):
        value, *rest = loss_fn(model, rng, state, x)
        return (value * salt, *rest)

    state, step = layout.build(
        build_model,
        "bfloat16",
        mesh=mesh,
        loss_fn=loss,
        optimizer=optax.sgd(0.5),
        rng=jax.random.key(0),
    )
    layers = pz.select(state.model).at_instances_of(GatherParameters).get_sequence()
    assert [layer.stored for layer in layers] == [layout.parameters]
    step.lower(state, x=layout.shard_batch(batch(), mesh)).compile(
        compiler_options={
            "xla_dump_to": str(tmp_path),
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
        }
    )
    (path,) = pathlib.Path(tmp_path).glob("*.after_spmd-partitioning.*txt")
    # Both parameters, of 16 x 32 elements.
    assert gathered_bytes(path.read_text()) == {"bf16": 1024}


def test_parameters_that_are_not_cast_are_not_pinned_twice():
    layout = laid_out("fully_sharded")
    edited = layout.recipe(build_model(), make_mesh(MESH)).apply(build_model())
    layers = pz.select(edited).at_instances_of(GatherParameters).get_sequence()
    assert [layer.stored for layer in layers] == [None]
