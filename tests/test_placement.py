"""Placing trees of named arrays, and models, by logical axis names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from penzai import pz
from penzai.models import simple_mlp

from penzai_shard.checkpointing import restore_params, save_params
from penzai_shard.errors import MeshError, PlanError, RuleTypeError, ShardingError
from penzai_shard.meshes import has_explicit_axes, make_mesh
from penzai_shard.placement import abstract_model, name_to_name_device_put, place
from penzai_shard.planning import make_plan, name_axes, name_to_name_sharding
from penzai_shard.training import TrainState, shard_batch

RULES = {"features": "data", "features_out": "model"}


@pytest.fixture
def mesh():
    return make_mesh({"data": 4, "model": 2})


def named(data, *names):
    return pz.nx.wrap(data).tag(*names)


def mlp():
    return simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[8, 16, 4]
    )


def test_arrays_lie_by_their_names_and_keep_their_values(mesh):
    data = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    placed = name_to_name_device_put({"w": named(data, "a", "b")}, mesh, {"a": "data"})
    assert placed["w"].data_array.sharding == NamedSharding(mesh, PartitionSpec("data"))
    assert placed["w"].data_array.addressable_shards[0].data.shape == (2, 8)
    np.testing.assert_array_equal(placed["w"].data_array, data)


def test_without_rules_each_axis_goes_to_the_mesh_axis_of_its_name(mesh):
    placed = name_to_name_device_put(pz.nx.ones({"model": 4, "other": 3}), mesh)
    assert placed.data_array.sharding.spec == PartitionSpec("model")


def test_views_and_positional_dimensions_are_placed(mesh):
    array = pz.nx.wrap(np.ones((3, 8), np.float32)).tag("a", "b")
    view = array.untag("a")
    placed = name_to_name_device_put([view], mesh, {"b": "data"})[0]
    assert placed.data_array.sharding.shard_shape(placed.data_array.shape) == (3, 2)
    assert placed.named_shape == view.named_shape


def test_model_gets_new_variables_and_the_old_ones_keep_their_arrays(mesh):
    model = mlp()
    before = {p.label: p.value.data_array for p in pz.unbind_params(model)[1]}
    placed = name_to_name_device_put(model, mesh, RULES)
    parameters = {p.label: p for p in pz.unbind_params(placed)[1]}
    assert parameters.keys() == before.keys()
    for parameter in pz.unbind_params(model)[1]:
        assert parameter.value.data_array is before[parameter.label]
        assert parameters[parameter.label] is not parameter
        np.testing.assert_array_equal(
            parameters[parameter.label].value.data_array, before[parameter.label]
        )


def test_model_lies_exactly_as_the_sharding_tree_says(mesh):
    model = mlp()
    placed = pz.freeze_variables(name_to_name_device_put(model, mesh, RULES))
    wanted = name_to_name_sharding(model, mesh, RULES)
    assert jax.tree.structure(placed) == jax.tree.structure(wanted)
    assert [leaf.sharding for leaf in jax.tree.leaves(placed)] == jax.tree.leaves(wanted)


def test_placed_model_computes_what_the_model_does(mesh):
    model = mlp()
    x = pz.nx.ones({"batch": 8, "features": 8})
    placed = name_to_name_device_put(model, mesh, RULES)
    expected, got = model(x), placed(x)
    np.testing.assert_allclose(
        got.unwrap("batch", "features"), expected.unwrap("batch", "features"), rtol=1e-5
    )


def test_variable_that_occurs_twice_stays_one_and_keeps_its_metadata(mesh):
    shared = pz.Parameter(value=pz.nx.ones({"a": 8}), label="w", metadata={"frozen": True})
    state = pz.StateVariable(value=pz.nx.zeros({"a": 8}), label="s")
    placed = name_to_name_device_put([shared, {"again": shared}, state], mesh, {"a": "data"})
    assert placed[0] is placed[1]["again"]
    assert placed[0] is not shared
    assert placed[0].metadata == {"frozen": True}
    assert isinstance(placed[2], pz.StateVariable)
    assert placed[2].value.data_array.sharding.spec == PartitionSpec("data")


def test_array_that_occurs_twice_is_placed_at_both_places(mesh):
    array = pz.nx.ones({"a": 8})
    placed = name_to_name_device_put([array, array], mesh, {"a": "data"})
    assert [leaf.data_array.sharding.spec for leaf in placed] == [PartitionSpec("data")] * 2


def test_scalars_are_replicated(mesh):
    placed = name_to_name_device_put({"epsilon": jnp.float32(1e-6)}, mesh)
    assert placed["epsilon"].sharding == NamedSharding(mesh, PartitionSpec())


def test_mesh_with_explicit_axes_is_treated_as_its_auto_twin():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    placed = name_to_name_device_put(mlp(), explicit, RULES)
    for parameter in pz.unbind_params(placed)[1]:
        assert not has_explicit_axes(parameter.value.data_array.sharding.mesh)
    placed(pz.nx.ones({"batch": 8, "features": 8}))


def test_arrays_on_a_mesh_with_explicit_axes_are_relabelled(mesh):
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    on_explicit = jax.device_put(
        jnp.ones((8, 4)), NamedSharding(explicit, PartitionSpec("data", "model"))
    )
    placed = name_to_name_device_put(
        pz.nx.wrap(on_explicit).tag("a", "b"), explicit, {"a": "data", "b": "model"}
    )
    assert placed.data_array.sharding == NamedSharding(mesh, PartitionSpec("data", "model"))


def test_unnamed_array_is_refused_with_its_path(mesh):
    with pytest.raises(PlanError, match=r"layers/0/w.*no logical axis names"):
        name_to_name_device_put({"layers": [{"w": jnp.ones((4,))}]}, mesh)


def test_length_that_does_not_divide_is_refused_before_anything_is_placed(mesh):
    with pytest.raises(
        ShardingError, match=r"'a' \(6\) does not divide over mesh axis 'data' \(4\)"
    ):
        name_to_name_device_put(pz.nx.ones({"a": 6}), mesh, {"a": "data"})


def test_unknown_mesh_axis_is_refused(mesh):
    with pytest.raises(MeshError, match="'tensor'"):
        name_to_name_device_put(pz.nx.ones({"a": 8}), mesh, {"a": "tensor"})


def test_mesh_without_devices_is_refused():
    with pytest.raises(MeshError, match="it has no devices"):
        name_to_name_device_put(pz.nx.ones({"a": 8}), AbstractMesh((4, 2), ("data", "model")))


def test_an_abstract_model_is_refused_with_its_parameters(mesh):
    abstract = abstract_model(mlp)
    match = (
        r"no value:\n  mlp/Affine_0/Linear.weights: build it with sharded_init, or fill it with re"
    )
    for place_it in (place, name_to_name_device_put):
        with pytest.raises(ShardingError, match=match):
            place_it(abstract, mesh, RULES)


def test_a_plan_is_taken_by_name_and_by_position(mesh):
    plan = make_plan({"w": named(np.ones((8, 4)), "a", "b")}, mesh, {"a": "data"})
    tree = {"w": named(np.ones((8, 4), np.float32), "a", "b")}
    for placed in (
        name_to_name_device_put(tree, plan=plan),
        name_to_name_device_put(tree, plan),
        place(tree, plan),
        place(tree, plan_or_mesh=plan),
        place(tree, plan=plan),
        place(tree, mesh, plan=plan),
    ):
        assert {s.data.shape for s in placed["w"].data_array.addressable_shards} == {(2, 4)}
    with pytest.raises(RuleTypeError, match="place: two plans are given"):
        place(tree, plan, plan=plan)
    with pytest.raises(RuleTypeError, match=r"place needs a plan, place\(tree, plan\), or a mesh"):
        place(tree)


def test_an_array_that_was_donated_is_named(mesh):
    model = mlp()
    next(iter(pz.unbind_params(model)[1])).value.data_array.delete()
    match = r"no longer there.*\n  mlp/Affine_0/Linear.weights: was donated or deleted"
    with pytest.raises(ShardingError, match=match):
        place(model, mesh, RULES)


@pytest.mark.parametrize("act", [place, name_to_name_device_put])
def test_an_array_that_was_donated_is_named_also_where_its_layout_stays_the_same(mesh, act):
    model = place(mlp(), mesh, RULES)
    plan = make_plan(model, mesh, RULES)
    for variable in pz.unbind_params(model)[1]:
        variable.value.data_array.delete()
    match = r"no longer there.*\n  mlp/Affine_0/Linear.weights: was donated or deleted"
    for how in ((mesh, RULES), (plan,)):
        with pytest.raises(ShardingError, match=match):
            act(model, *how)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (mlp, r"the function mlp\. Give what it builds: abstract_model\(mlp, \.\.\.\), without"),
        (lambda: None, r"the function <lambda>\. .* abstract_model\(build_model, \.\.\.\)"),
        (simple_mlp.MLP, r"the class MLP\. .* sharded_init\(MLP, \.\.\., mesh=mesh, rules=rules\)"),
        (functools.partial(mlp), r"a partial\."),
        (None, r"None\."),
    ],
)
def test_what_builds_a_model_is_not_planned_or_placed_or_restored_as_one(
    mesh, tree, message, tmp_path
):
    path = save_params(tmp_path / "params", mlp())
    for act in (
        lambda: make_plan(tree, mesh, RULES),
        lambda: name_to_name_sharding(tree, mesh, RULES),
        lambda: place(tree, mesh, RULES),
        lambda: name_to_name_device_put(tree, mesh, RULES),
        lambda: restore_params(path, tree, mesh, RULES, on_extra="ignore"),
        lambda: TrainState.initial_state(tree, optax.sgd(0.1), jax.random.key(0)),
    ):
        with pytest.raises(RuleTypeError, match=r"takes a model or another tree.*not " + message):
            act()


@pytest.mark.parametrize("tree", [{}, [], {"a": None}, pz.nn.Identity(), {"f": jnp.tanh}, 1.0])
def test_trees_without_arrays_that_are_pytrees_may_be_planned_and_placed(mesh, tree):
    assert not make_plan(tree, mesh, {}).total_bytes or tree == 1.0
    placed = place(tree, mesh, {})
    assert jax.tree.structure(placed) == jax.tree.structure(tree)


@pytest.mark.parametrize("function", [place, shard_batch, name_to_name_device_put])
def test_inside_a_traced_function_the_layout_is_kept_too(mesh, function):
    tree = {"x": named(np.ones((8, 4), np.float32), "a", "b"), "scale": 2.0}

    def double(tree):
        return jax.tree.map(lambda x: x * 2, function(tree, mesh, {"a": "data"}))

    for transform in (jax.jit, lambda f: f):
        doubled = transform(double)(tree)
        array = doubled["x"].data_array
        assert {s.data.shape for s in array.addressable_shards} == {(2, 4)}
        np.testing.assert_array_equal(array, 2 * np.ones((8, 4)))
    gradient = jax.grad(
        lambda x: (function({"x": x}, mesh, {"a": "data"})["x"] ** 2).data_array.sum()
    )
    np.testing.assert_array_equal(gradient(tree["x"]).data_array, 2 * np.ones((8, 4)))


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("rules", [{"a": "data"}, {}])
def test_writing_to_a_numpy_array_later_changes_nothing_that_was_placed(mesh, rules, is_view):
    buffer = np.ones(2**12 + 16, np.float32)
    start = -buffer.ctypes.data % 64 // buffer.itemsize  # JAX shares memory that is aligned so.
    array = buffer[start:][: 2**12]
    array.flags.writeable = not is_view
    placed = place(name_axes({"w": array}, {"w": ("a",)}), mesh, rules)["w"].data_array
    state = TrainState.initial_state({"w": array}, optax.sgd(0.1), jax.random.key(0))
    held = jax.device_put(state.params["w"], mesh.devices.flat[0])
    jax.block_until_ready((placed, held))
    buffer[:] = 3
    assert {float(placed.min()), float(placed.max()), float(held.min()), float(held.max())} == {1}


def test_integers_that_jax_would_cut_off_are_refused(mesh):
    tree = {
        "ids": np.array([1, 2**31]),
        "few": np.array([2**31 - 1, -(2**31)]),
        "none": np.zeros(0, int),
    }
    with pytest.raises(ShardingError, match="JAX would keep other integers than these:") as caught:
        place(tree, mesh, on_unnamed="replicate")
    assert caught.value.problems == (
        "ids: has values of int64 beyond those of int32. Set "
        "jax.config.update('jax_enable_x64', True), or scale them down.",
    )
    assert place({"w": tree["few"]}, mesh, on_unnamed="replicate")["w"].dtype == jnp.int32
