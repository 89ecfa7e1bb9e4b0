"""Constraint layers: a layout for what flows through, and no other change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import penzai_mlp
from tests.refusals import problems_of

AUTO, EXPLICIT = (pzs.make_mesh({"data": 4, "model": 2}, explicit=e) for e in (False, True))
ON_BOTH_MESHES = pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
X = pz.nx.wrap(jnp.arange(64.0).reshape(8, 8), "batch", "features")
RULES = {"batch": "data"}


@ON_BOTH_MESHES
@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_layouts_are_as_said_and_values_stay(mesh, transform):
    tree = {"x": jax.device_put(X, NamedSharding(mesh, P("data"))), "y": (X.untag("features"),)}
    split = NamedSharding(mesh, P(None, "model"))
    rules = {"features": "model", "batch": None}
    for layer, specs in (
        (pzs.ConstrainShardingByName(mesh, rules), [P(None, "model"), P()]),
        (pzs.ConstrainSharding(split), [P(None, "model")] * 2),
        (pzs.ConstrainSharding({"x": split, "y": None}), [P(None, "model"), None]),
    ):
        output = transform(layer.__call__)(tree)
        jax.tree.map(np.testing.assert_array_equal, output, tree)
        for x, spec in zip(jax.tree.leaves(output), specs, strict=True):
            assert spec is None or x.sharding == NamedSharding(AUTO, spec)


@ON_BOTH_MESHES
@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}])
def test_mesh_axes_of_shard_map_are_left_out(mesh, manual):
    by_name = pzs.ConstrainShardingByName(mesh, RULES | {"features": "model"})
    whole = pzs.ConstrainSharding(NamedSharding(mesh, P(("data", "model"))))

    def part(x):
        # A row for each device, which divides no further.
        return whole(by_name(pz.nx.wrap(x, "batch", "features")).data_array * 2)

    options = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data"), "axis_names": manual}
    x = jax.device_put(X.data_array[:4], NamedSharding(mesh, P("data")))
    lowered = jax.jit(jax.shard_map(part, **options)).lower(x)
    assert ('[{}, {"model"}]' in lowered.as_text()) == (mesh == AUTO and manual == {"data"})
    np.testing.assert_array_equal(lowered.compile()(x), 2 * X.data_array[:4])


@ON_BOTH_MESHES
def test_activations_lie_as_said_and_gradients_are_right(mesh):
    split = RULES | {"features": "model"}
    mlp, seen = penzai_mlp(), []

    def see(x):
        seen.append(getattr(x.data_array, "sharding", None))
        return mlp(x)

    layer = pzs.ConstrainActivations(see, mesh, (split, RULES), (RULES, split))
    output = layer(X)
    assert seen == [NamedSharding(AUTO, P("data"))]
    assert output.data_array.sharding.shard_shape((8, 4)) == (2, 2)

    def gradient(layer):
        return jax.jit(jax.grad(lambda x: (layer(x).data_array ** 2).sum()))(X).data_array

    np.testing.assert_allclose(gradient(layer), gradient(mlp), rtol=1e-4, atol=1e-4)


def test_options_are_those_of_make_plan():
    options = {"on_indivisible": "replicate", "on_unnamed": "infer"}
    layer = pzs.ConstrainShardingByName(mesh=AUTO, axis_name_to_mesh_name=RULES, **options)
    assert layer == pzs.ConstrainShardingByName(AUTO, rules=RULES, **options)
    assert "AxisRules('batch' -> 'data')" in treescope.render_to_text(layer)
    mask = jax.device_put(jnp.ones(8), NamedSharding(AUTO, P("model")))
    output = jax.tree.leaves(layer([mask, pz.nx.ones({"batch": 6}), X]))
    assert [x.sharding.spec for x in output] == [P("model"), P(), P("data")]


def test_layouts_that_cannot_be_are_refused_by_path():
    tree = {"x": pz.nx.ones({"batch": 6}), "y": jnp.ones((8, 2)), "z": X}
    problems = problems_of(pzs.PlanError, pzs.ConstrainShardingByName(AUTO, RULES), tree)
    assert [(p.path, p.kind) for p in problems] == [("x", "indivisible"), ("y", "unnamed")]
    with pytest.warns(pzs.ShardingWarning, match="batch") as warned:
        pzs.ConstrainShardingByName(AUTO, {"bacth": "data"})(X)
    assert warned[0].filename == __file__


def test_errors_that_are_not_of_a_layout_stay_what_they_are(monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(jax, "device_put", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        pzs.ConstrainSharding(NamedSharding(AUTO, P("data")))(X)


def test_other_devices_are_refused_by_path():
    first, second = (pzs.make_mesh({"data": 4}, jax.devices()[i : i + 4]) for i in (0, 4))
    abstract = pzs.make_mesh({"data": 4}, abstract=True)
    x = {"x": pzs.place(X, first, RULES)}
    for mesh in (abstract, second):
        by_name = pzs.ConstrainShardingByName(mesh, RULES)
        for layer in (by_name, pzs.ConstrainSharding(NamedSharding(mesh, P("data")))):
            problems = problems_of(pzs.MeshError, layer, x)
            assert [problem.path.split("/")[0] for problem in problems] == ["x"]
    # An array on one device is spread.
    spread = by_name(jax.device_put(X, jax.devices()[5]))
    assert spread.data_array.sharding.shard_shape((8, 8)) == (2, 8)
