"""Functions compiled with layouts by name."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from penzai.models import simple_mlp

import penzai_shard as pzs
from tests.models import counted_mlp
from tests.refusals import problems_of

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"embed": "data", "features": "data", "mlp": "model"}
KEY = jax.random.key(0)


PENZAI = functools.partial(simple_mlp.MLP.from_config, feature_sizes=[8, 16], init_base_rng=KEY)
EQUINOX = functools.partial(eqx.nn.MLP, 8, 8, 16, 2, activation=jnp.tanh, key=KEY)


@pytest.mark.parametrize("construct", [PENZAI, EQUINOX], ids=["penzai", "equinox"])
def test_named_jit_of_a_constructor(construct):
    made = pzs.named_jit(construct, MESH, RULES)()
    expected = pzs.place(construct(), MESH, RULES, on_unnamed="infer")
    assert pz.select(made).at_instances_of(pz.Parameter).count() == 2 * (construct is PENZAI)
    made, expected = map(pz.freeze_variables, (made, expected))
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    leaves = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (made, expected))
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        # What has no names is left to JAX.
        assert not b.committed or a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_named_jit_lays_out_arguments():
    def forward(x, *, y):
        return x.untag("a").unwrap() + y["y"].untag("a").unwrap()

    compiled = pzs.named_jit(forward, MESH, {"a": "model"}, in_rules={"a": "data"})
    x = pz.nx.ones({"a": 8})
    program = str(jax.make_jaxpr(lambda x, y: compiled(x, y=y))(x, {"y": x}))
    assert program.count("P('data',)") == 2
    assert "P('model',)" not in program
    np.testing.assert_array_equal(compiled(x, y={"y": x}), 2 * np.ones(8))


def test_named_jit_donates_and_traces_once():
    def update(model, batch, *, activation=jnp.tanh):
        traces.append(activation)
        model = (
            pz.select(model)
            .at_instances_of(pz.Parameter)
            .apply(lambda p: pz.Parameter(value=p.value * 2, label=p.label))
        )
        return model, activation(batch)

    traces = []
    step = pzs.named_jit(update, MESH, RULES, donate_argnums=(0,))
    model, batch = pzs.place(counted_mlp(), MESH, RULES, on_unnamed="replicate"), jnp.ones(8)
    for _ in range(3):
        before, (model, result) = model, step(model, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(pz.freeze_variables(before)))
    assert isinstance(model.count, pz.StateVariable)
    assert (len(traces), result.shape, batch.is_deleted()) == (1, (8,), False)
    step(model, batch, activation=jax.nn.relu)
    step({"model": counted_mlp()}["model"].body, batch)
    assert traces == [jnp.tanh, jax.nn.relu, jnp.tanh]


def test_named_jit_refuses_assignments():
    run = pzs.named_jit(lambda model: model(pz.nx.ones({"features": 8})), MESH, RULES)
    (problem,) = problems_of(pzs.ShardingError, run, counted_mlp())
    assert "return what it would assign" in problem.fix
