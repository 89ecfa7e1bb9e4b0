"""`GatherParameters`: stored in one layout, used in another."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from tests.models import EMBED, haliax_mlp, hax
from tests.refusals import refused

MESH = pzs.make_mesh({"data": 4, "model": 2})
STORED = {"features": "data", "neurons": "model"}


def layer():
    linear, sizes = pz.nn.Linear.from_config, ({"features": 8}, {"neurons": 32})
    up, down = linear("up", jax.random.key(0), *sizes), linear("d", jax.random.key(1), *sizes[::-1])
    return pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down])


def gather(body, **options):
    return pzs.GatherParameters(body, MESH, {"neurons": "model"}, **options)


def lower(wrap):
    """The gradient of a fully sharded model: traced and compiled program, values."""
    slots, parameters = pz.unbind_params(pzs.place(layer(), MESH, STORED), freeze=True)
    x = pzs.place(pz.nx.ones({"batch": 8, "features": 8}), MESH, {"batch": "data"})

    def loss(parameters, x):
        output = wrap(pz.bind_variables(slots, parameters))(x)
        return jnp.mean(output.unwrap("batch", "features") ** 2)

    shardings = jax.tree.map(lambda array: array.sharding, parameters)
    traced = jax.jit(jax.grad(loss), out_shardings=shardings).trace(parameters, x)
    compiled = traced.lower().compile()
    values = [value.value.data_array for value in compiled(parameters, x)]
    return str(traced.jaxpr), compiled.as_text(), values


# How often a parameter is gathered, and how many layouts are pinned: of two parameters and of their
# gradients; the first layer's weights are not needed for their own gradient.
@pytest.mark.parametrize(
    ("policy", "options", "gathers", "pins"),
    [
        ("everything", {}, 2, 4),
        ("everything", {"gradients_as_used": False}, 2, 2),
        ("everything", {"stored": STORED}, 2, 8),
        ("all_but_gathered", {}, 3, 5),
    ],
)
def test_parameters_are_gathered_where_they_are_used(policy, options, gathers, pins):
    wrap = lambda body: pzs.Checkpointed(gather(body, **options), policy)  # noqa: E731
    program, text, values = lower(wrap)
    # Of [features=8, neurons=32] the features are gathered, and the neurons stay split in two.
    found = re.findall(r"= f32\[([\d,]+)\][^=]*? all-gather(?:-start)?\(", text)
    assert (set(found), len(found)) == ({"8,16", "16,8"}, gathers)
    assert "all-to-all" not in text
    assert program.count("sharding_constraint") == pins
    for value, expected in zip(values, lower(lambda body: body)[2], strict=True):
        assert value.sharding == expected.sharding
        np.testing.assert_allclose(value, expected, 1e-5, 1e-6)


@pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim:DeprecationWarning")
def test_axes_of_other_libraries_are_gathered():
    model = pzs.place(haliax_mlp(), MESH, {"embed": "data", "mlp": "model"})
    arrays, rest = eqx.partition(pzs.GatherParameters(model, MESH, {"mlp": "model"}), eqx.is_array)
    x = pzs.place(hax.ones(EMBED), MESH, {})
    call = jax.jit(lambda arrays, x: eqx.combine(arrays, rest)(x).array).lower(arrays, x).compile()
    assert "all-gather" in call.as_text()
    np.testing.assert_allclose(call(arrays, x), model(x).array, 1e-5, 1e-6)


def test_what_does_not_fit_is_refused_by_path_and_all_at_once():
    odd = pz.nn.Affine.from_config("odd", jax.random.key(0), {"features": 8}, {"neurons": 3})
    x = pz.nx.ones({"features": 8})
    problems = refused(pzs.PlanError, gather(odd), x)
    assert problems.keys() == {"odd/AddBias.bias", "odd/Linear.weights"}
    assert all(problem.fix for problem in problems.values())
