"""The plan of a train state shows what a step holds beside it: the gradients."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz

from penzai_shard import Layout
from penzai_shard.placement import place
from penzai_shard.planning import make_plan
from penzai_shard.training import TrainState, train_state_sharding

MESH = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
RULES = {"in": "data", "out": "model"}


def weights(dtype=jnp.float32, name="w"):
    value = pz.nx.wrap(jnp.zeros((64, 32), dtype), "in", "out")
    return {
        "w": pz.Parameter(value=value, label=name),
        "bias": pz.Parameter(value=pz.nx.zeros({"out": 32}, dtype=dtype), label="bias"),
    }


def state_of(model=None, optimizer=None, key=None, **options):
    return TrainState.initial_state(
        model or weights(),
        optimizer or optax.adamw(1e-3),
        jax.random.key(0) if key is None else key,
        **options,
    )


def by_path(leaves):
    return {leaf.path: leaf for leaf in leaves}


def test_adamw_in_float32_takes_sixteen_bytes_per_parameter():
    plan = make_plan(state_of(), MESH, RULES)
    count = 64 * 32 + 32
    parts = {"params": 0, "gradients": 0, "opt_state": 0}
    for leaf in (*plan.leaves, *plan.transient):
        if leaf.shape:
            size = leaf.dtype.itemsize
            for length in leaf.shape:
                size *= length
            parts[leaf.path.partition("/")[0]] += size
    assert parts == {"params": 4 * count, "gradients": 4 * count, "opt_state": 8 * count}
    scalars = sum(leaf.bytes_per_device for leaf in plan.leaves if not leaf.shape)
    assert plan.total_bytes == 16 * count + scalars
    on_each = 64 * 32 // 8 + 32 // 2
    assert plan.bytes_per_device == 16 * on_each + scalars
    assert plan.transient_bytes_per_device == 4 * on_each


def test_gradients_are_laid_out_as_their_parameters_and_not_as_the_optimizer():
    layout = Layout(parameters={"in": "model"}, compute={}, optimizer={"in": ("data", "model")})
    plan = layout.plan(state_of(), MESH)
    leaves, gradients = by_path(plan.leaves), by_path(plan.transient)
    assert set(gradients) == {"gradients/w", "gradients/bias"}
    for name in ("w", "bias"):
        parameter, gradient = leaves[f"params/{name}"], gradients[f"gradients/{name}"]
        assert gradient.sharding is parameter.sharding
        assert gradient.shard_shape == parameter.shard_shape
        assert (gradient.names, gradient.dtype) == (parameter.names, parameter.dtype)
    assert gradients["gradients/w"].shard_shape == (32, 32)
    assert leaves["opt_state/0/mu/w"].shard_shape == (8, 32)


def test_gradients_have_the_dtype_of_their_parameters():
    plan = make_plan(
        state_of(weights(jnp.bfloat16), optax.adamw(1e-3, mu_dtype=jnp.float32)), MESH, RULES
    )
    assert {leaf.dtype for leaf in plan.transient} == {jnp.dtype(jnp.bfloat16)}


def test_frozen_parameters_have_none():
    model = weights() | {"base": pz.ParameterValue(label="base", value=pz.nx.ones({"in": 64}))}
    state = state_of(model, trainable=lambda parameter: parameter.label == "w")
    plan = make_plan(state, MESH, RULES)
    assert [leaf.path for leaf in plan.transient] == ["gradients/w"]
    assert {"params/base", "params/bias", "params/w"} <= set(by_path(plan.leaves))


def test_the_plan_of_an_abstract_state_is_the_same():
    plan = make_plan(state_of(), MESH, RULES)
    abstract = make_plan(jax.eval_shape(state_of), MESH, RULES)
    assert abstract.transient == plan.transient
    assert abstract.leaves == plan.leaves


def test_a_plan_of_parameters_alone_has_no_gradients():
    plan = make_plan(weights(), MESH, RULES)
    assert plan.transient == ()
    assert plan.bytes_per_device == 4 * (64 * 32 // 8 + 32 // 2)
    assert "gradients" not in str(plan)
    assert "while a step runs" not in str(plan)


def test_they_are_no_part_of_what_is_placed(mesh):
    state = state_of()
    plan = make_plan(state, mesh, RULES)
    assert jax.tree.structure(plan.sharding_tree()) == jax.tree.structure(state)
    shardings = train_state_sharding(state, mesh, RULES)
    assert jax.tree.leaves(plan.sharding_tree()) == jax.tree.leaves(shardings)
    assert jax.tree.structure(plan.restore_structs()) == jax.tree.structure(state)
    placed = place(state, plan)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert held == plan.bytes_per_device - plan.transient_bytes_per_device


def test_every_view_shows_them():
    plan = make_plan(state_of(), MESH, RULES)
    first, *_ = str(plan).splitlines()
    verdict = " ".join(str(plan).split("array\n")[0].split())
    assert first.startswith("9 arrays and 2 gradients, ")
    assert "while a step runs, of which gradients 1.1 KiB, replicated " in verdict
    (row,) = [row for row in plan.table().rows if row[0].startswith("gradients")]
    assert row[:5] == (
        "gradients/...",
        "2",
        "as the parameters that are trained",
        "float32",
        "1.1 KiB",
    )
    rows = [row[0] for row in plan.table(collapse=False).rows]
    assert set(rows[-2:]) == {"gradients/w", "gradients/bias"}
    read = json.loads(plan.to_json())
    assert read["transient_bytes_per_device"] == plan.transient_bytes_per_device
    assert {entry["path"] for entry in read["transient"]} == {"gradients/w", "gradients/bias"}
    assert read["bytes_per_device"] == plan.bytes_per_device
    html = plan._repr_html_().replace("<wbr>", "")
    assert "gradients/..." in html
    assert "2 gradients" in html


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_state_with_any_form_of_key_can_be_planned(make_key):
    plan = make_plan(state_of(key=make_key(0)), MESH, RULES)
    assert by_path(plan.leaves)["root_rng"].is_replicated
