"""Constraint layers: a layout for what flows through, and no other change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, PlanError, ShardingError
from penzai_shard.layers import ConstrainSharding, ConstrainShardingByName
from penzai_shard.meshes import auto_twin

MESHES = ["AUTO", "EXPLICIT"]


def by_name(small, mesh_name="AUTO", rules=None):
    return ConstrainShardingByName(
        getattr(small, mesh_name), {"batch": "data"} if rules is None else rules
    )


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_values_stay_and_the_layout_is_that_of_the_rules(small, mesh_name, transform):
    tree = {"x": small.features(), "y": (small.features(4).untag("features"),)}
    expected_specs = [PartitionSpec("data"), PartitionSpec("data")]
    output = transform(by_name(small, mesh_name))(tree)
    assert jax.tree_util.tree_structure(output) == jax.tree_util.tree_structure(tree)
    leaves = jax.tree_util.tree_leaves(output)
    for leaf, original, spec in zip(
        leaves, jax.tree_util.tree_leaves(tree), expected_specs, strict=True
    ):
        np.testing.assert_array_equal(leaf, original)
        assert leaf.sharding == NamedSharding(small.AUTO, spec)


def test_views_are_constrained_by_their_own_dimension_order(small):
    view = pz.nx.ones({"features": 8, "batch": 4}).untag("features")
    output = by_name(small)(view)
    assert output.data_array.sharding.spec == PartitionSpec(None, "data")


def test_rules_may_have_any_form_and_are_kept_as_given(small):
    for rules in (
        {"batch": "data"},
        [("batch", "data")],
        (("batch", "data"),),
        AxisRules({"batch": "data"}),
    ):
        layer = by_name(small, rules=rules)
        assert layer.axis_name_to_mesh_name is rules
        assert layer == by_name(small, rules=rules)
        assert layer(small.features()).data_array.sharding.spec == PartitionSpec("data")
    identity = ConstrainShardingByName(small.AUTO)
    value = pz.nx.ones({"model": 2, "batch": 3})
    assert identity(value).data_array.sharding.spec == PartitionSpec("model")


def test_side_inputs_are_ignored(small):
    stream = pz.RandomStream.from_base_key(jax.random.key(0))
    output = by_name(small)(small.features(), random_stream=stream, mask=None)
    np.testing.assert_array_equal(output.data_array, small.features().data_array)


def test_gradients_pass_through(small):
    value = small.features()
    for layer in (by_name(small), ConstrainSharding(NamedSharding(small.AUTO, PartitionSpec()))):
        gradient = jax.grad(lambda x, layer=layer: jnp.sum(layer(x).data_array ** 2))(value)
        np.testing.assert_allclose(gradient.data_array, 2 * value.data_array, rtol=1e-6)


def test_mapped_dimensions_are_left_to_the_compiler(small):
    stacked = small.features().untag("features").with_positional_prefix()
    output = jax.jit(jax.vmap(by_name(small)))(stacked)
    np.testing.assert_array_equal(output.data_array, stacked.data_array)
    assert output.data_array.sharding.shard_shape((8, 8))[1] == 2


def test_explicit_arrays_come_out_on_the_auto_twin(small):
    value = small.placed(small.features(), small.EXPLICIT, PartitionSpec("data"))
    for transform in (lambda function: function, jax.jit):
        output = transform(by_name(small, "EXPLICIT"))(value)
        assert output.data_array.sharding == NamedSharding(
            auto_twin(small.EXPLICIT), PartitionSpec("data")
        )


def test_under_an_explicit_ambient_mesh(small):
    twin = auto_twin(small.EXPLICIT)
    value = small.placed(small.features(), twin)
    with jax.set_mesh(small.EXPLICIT):
        eager = by_name(small, "EXPLICIT")(value)
        jitted = jax.jit(by_name(small, "EXPLICIT"))(value)
    assert eager.data_array.sharding == jitted.data_array.sharding
    assert jitted.data_array.sharding == NamedSharding(twin, PartitionSpec("data"))


def test_an_array_placed_on_one_device_is_spread(small):
    value = jax.device_put(small.features(), jax.devices()[3])
    assert by_name(small)(value).data_array.sharding.shard_shape((8, 8)) == (2, 8)


@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}])
@pytest.mark.parametrize("mesh_name", MESHES)
def test_inside_shard_map_only_the_other_mesh_axes_are_constrained(small, manual, mesh_name):
    mesh = getattr(small, mesh_name)
    constrain = by_name(small, mesh_name, {"batch": "data", "features": "model"})
    whole = ConstrainSharding(NamedSharding(mesh, PartitionSpec(("data", "model"))))

    def part(array):
        named = constrain(pz.nx.wrap(array, "batch", "features"))
        return whole(named.data_array * 2)

    mapped = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        axis_names=manual,
    )
    array = jax.device_put(small.features().data_array, NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_array_equal(jax.jit(mapped)(array), 2 * array)


def test_inside_shard_map_lengths_are_those_of_one_part(small):
    constrain = by_name(small, rules={"batch": "data", "features": "model"})
    lowered = jax.jit(
        jax.shard_map(
            lambda array: constrain(pz.nx.wrap(array, "batch", "features")).data_array,
            mesh=small.AUTO,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
            axis_names={"data"},
        )
    ).lower(jnp.ones((4, 8)))  # One row per part, which does not divide over 4.
    assert '[{}, {"model"}]' in lowered.as_text()


def test_one_sharding_or_a_tree_of_them(small):
    data = NamedSharding(small.AUTO, PartitionSpec("data"))
    model = NamedSharding(small.EXPLICIT, PartitionSpec("model"))
    tree = {"a": jnp.ones(8), "b": [small.features(), jnp.ones(4)], "c": jnp.ones(3)}
    layer = ConstrainSharding({"a": data, "b": model, "c": None})
    for transform in (lambda function: function, jax.jit):
        output = transform(layer)(tree)
        assert output["a"].sharding == data
        for leaf in jax.tree_util.tree_leaves(output["b"]):
            assert leaf.sharding == NamedSharding(small.AUTO, PartitionSpec("model"))
        np.testing.assert_array_equal(output["c"], tree["c"])
    everywhere = ConstrainSharding(data)([jnp.ones(8), small.features()])
    assert all(leaf.sharding == data for leaf in jax.tree_util.tree_leaves(everywhere))


def test_a_bare_spec_means_the_ambient_mesh(small):
    with jax.set_mesh(small.AUTO):
        output = jax.jit(ConstrainSharding(PartitionSpec("data")))(jnp.ones(8))
    assert output.sharding == NamedSharding(small.AUTO, PartitionSpec("data"))


def test_unnamed_arrays_are_refused(small):
    with pytest.raises(ShardingError, match=r"no logical axis names|unnamed|without names"):
        by_name(small)({"x": jnp.ones((8, 2))})


def test_lengths_that_do_not_divide_are_refused_all_at_once(small):
    tree = {"x": pz.nx.ones({"batch": 6}), "y": pz.nx.ones({"batch": 5})}
    with pytest.raises(PlanError, match=r"(?s)x: logical axis 'batch' \(6\).*y: .*\(5\)"):
        by_name(small)(tree)


def test_unknown_mesh_axes_are_refused(small):
    with pytest.raises(MeshError, match="'dta'"):
        by_name(small, rules={"batch": "dta"})(small.features())


def test_goes_in_and_out_of_a_model_with_selectors(small):
    model = small.mlp()
    selection = pz.select(model).at_instances_of(pz.nn.Affine)
    edited = selection.insert_after(by_name(small))
    assert pz.select(edited).at_instances_of(ConstrainShardingByName).count() == 2
    restored = pz.select(edited).at_instances_of(ConstrainShardingByName).remove_from_parent()
    assert pz.select(restored).at_instances_of(ConstrainShardingByName).count() == 0
    assert restored == model
    gradients = [small.loss_and_gradients(each, small.features())[1] for each in (model, edited)]
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree_util.tree_map(compare, *gradients)


def test_layouts_are_planned_once_per_shape(small, monkeypatch):
    from penzai_shard.layers import constrain_sharding

    planned = []
    plan = constrain_sharding.name_to_name_sharding
    monkeypatch.setattr(
        constrain_sharding,
        "name_to_name_sharding",
        lambda tree, *rest: planned.append(tree) or plan(tree, *rest),
    )
    layer = by_name(small, rules={"batch": "data", "unused": None})
    for batch in (8, 8, 4, 8):
        layer(small.features(batch))
    assert len(planned) == 2
