"""`Layout.build`: a state and a step in one line, every array where it stays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

import penzai_shard
from penzai_shard import Layout, make_mesh, make_plan, strip
from penzai_shard.errors import MeshError, RuleTypeError
from tests.model_families import transformer

build_model = functools.partial(transformer, "llama", embedding_dim=16, mlp_hidden_dim=32)
TOKENS = pz.nx.wrap(jnp.arange(8 * 9).reshape(8, 9) % 16, "batch", "seq")


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    loss = -right.untag("batch", "seq").mean().unwrap()
    return loss, state, {"loss": loss}


def losses(layout, mesh, steps=3):
    state, step = layout.build(
        build_model,
        jax.random.key(0),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2),
        rng=jax.random.key(1),
    )
    history = []
    for _ in range(steps):
        state, aux = step(state, tokens=layout.shard_batch(TOKENS, mesh))
        history.append(float(aux["loss"]))
    return history, state


@functools.cache
def losses_on_one_device():
    return losses(Layout.data_parallel(), make_mesh({"data": 1}, jax.devices()[:1]))[0]


LAYOUTS = {
    "data_parallel": (Layout.data_parallel(), {"data": 8}),
    "zero1": (Layout.zero1(min_size=64), {"data": 8}),
    "fully_sharded": (Layout.fully_sharded(min_size=64), {"data": 8}),
    "fully_sharded, gathered again": (
        Layout.fully_sharded(min_size=64, reshard_after_forward=True),
        {"data": 8},
    ),
    "tensor_parallel": (Layout.tensor_parallel(), {"data": 4, "model": 2}),
    "two_dimensional": (Layout.two_dimensional(min_size=64), {"data": 4, "model": 2}),
    "hybrid": (Layout.hybrid(min_size=64), {"replica": 2, "data": 4}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_preset_trains_as_one_device_does(name):
    layout, shape = LAYOUTS[name]
    history, state = losses(layout, make_mesh(shape))
    np.testing.assert_allclose(history, losses_on_one_device(), rtol=2e-5)
    assert strip(state.model).body is not None


def build(layout=None, **arguments):
    given = {
        "mesh": make_mesh({"data": 4, "model": 2}),
        "loss_fn": loss_fn,
        "optimizer": optax.adam(1e-3),
        "rng": jax.random.key(0),
    }
    layout = layout or Layout.fully_sharded()
    return layout.build(build_model, jax.random.key(0), **(given | arguments))


def test_unknown_options_are_refused_with_what_to_write():
    message = re.escape(
        "Layout.build got unknown options:\n"
        "  acumulate_steps: neither a train step nor its state has this option. Did you mean "
        "'accumulate_steps'?\n"
        "  seed: neither a train step nor its state has this option. If the initializer takes it: "
        "functools.partial(initializer, seed=...). The options are "
    )
    with pytest.raises(RuleTypeError, match=message):
        build(acumulate_steps=2, seed=1)


def test_a_mesh_without_the_layouts_mesh_axis_is_refused():
    with pytest.raises(MeshError, match=r"mesh \(data=8\) has no mesh axis 'model'"):
        build(Layout.tensor_parallel(), mesh=make_mesh({"data": 8}))


def test_a_model_in_place_of_its_initializer_is_refused():
    with pytest.raises(RuleTypeError, match="needs the function that does, not a TransformerLM"):
        Layout.fully_sharded().build(
            build_model(jax.random.key(0)),
            mesh=make_mesh({"data": 8}),
            loss_fn=loss_fn,
            optimizer=optax.adam(1e-3),
            rng=jax.random.key(0),
        )


def test_a_layout_in_place_of_rules_is_refused():
    with pytest.raises(RuleTypeError, match=r"call layout\.plan\(model, mesh\)"):
        make_plan({}, make_mesh({"data": 8}), Layout.fully_sharded())


def test_options_reach_state_and_step():
    tied = lambda parameter: "embedder" not in parameter.label  # noqa: E731
    state, step = build(accumulate_steps=2, trainable=tied, donate_params_and_state=False)
    tokens = Layout.fully_sharded().shard_batch(TOKENS, make_mesh({"data": 4, "model": 2}))
    assert not any("embedder" in name for name in state.variables.trainable_names)
    after, aux = step(state, tokens=tokens)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert int(after.step) == 1
    assert np.isfinite(float(aux["loss"]))


def test_a_batch_without_a_batch_axis_is_refused():
    tokens = pz.nx.ones({"examples": 8, "seq": 2})
    with pytest.raises(
        RuleTypeError,
        match=r"no array of this batch has logical axis 'batch'; it has 'examples', 'seq'\. Name "
        r"it so, pz\.nx\.wrap\(x, 'batch', \.\.\.\), or tell the layout what it is called: "
        r'names=\{"batch": "\.\.\."\}',
    ):
        Layout.fully_sharded().shard_batch({"tokens": tokens}, make_mesh({"data": 8}))


def test_a_batch_is_split_along_what_the_layout_calls_it():
    layout = Layout.sequence_parallel(names={"batch": "examples"})
    mesh = make_mesh({"data": 4, "model": 2})
    placed = layout.shard_batch(pz.nx.ones({"examples": 8, "seq": 33}), mesh)
    assert placed.data_array.sharding.shard_shape((8, 33)) == (2, 33)


def test_a_layout_shows_what_is_not_as_by_default_and_evaluates_back():
    layout = Layout.two_dimensional(reshard_after_forward=True, names={"neurons": "mlp"})
    names = {name: getattr(penzai_shard, name) for name in penzai_shard.__all__}
    assert eval(repr(layout), names) == layout
    assert "optimizer" not in repr(layout)
    assert "gathered again" in layout.notebook_table().html()
