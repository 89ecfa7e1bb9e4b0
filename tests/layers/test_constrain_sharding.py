"""Constraint layers: a layout for what flows through, and no other change."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import (
    MeshError,
    PlanError,
    RuleTypeError,
    ShardingError,
    ShardingWarning,
)
from penzai_shard.layers import ConstrainSharding, ConstrainShardingByName, Jitted
from penzai_shard.meshes import auto_twin, make_mesh
from penzai_shard.placement import place
from penzai_shard.planning import Planner
from penzai_shard.rule_presets import fully_sharded, tensor_parallel

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


# Rules that are not what was meant


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_a_typo_warns_with_the_name_that_flows_through(small, transform):
    layer = by_name(small, rules={"bacth": "data"})
    with pytest.warns(
        ShardingWarning, match=r"'bacth' -> 'data' .* Did you mean 'batch'\?"
    ) as caught:
        transform(layer)(small.features())
    assert caught[0].filename == __file__


def test_a_typo_in_a_constraint_of_every_layer_is_one_warning_with_the_line_of_the_call(small):
    layers = [pz.nn.Identity(), by_name(small, rules={"bacth": "data"})] * 3
    model = Jitted(pz.nn.Sequential(layers))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model(small.features())
    assert [(warning.category, warning.filename) for warning in caught] == [
        (ShardingWarning, __file__)
    ]


def test_every_call_warns_also_when_the_layout_is_known(small):
    layer = by_name(small, rules={"bacth": "data"})
    for _ in range(2):
        with pytest.warns(ShardingWarning, match="Did you mean 'batch'"):
            layer(small.features())


@pytest.mark.parametrize("rules", [{"rows": "data"}, {"rows": "data", "heads": "model"}])
def test_rules_that_name_nothing_warn_of_the_copies_that_they_make(small, rules):
    match = (
        r"\('rows' -> 'data'.*\) name none of the logical axes of what flows through it \('batch', "
        r"'features'\), so every device gets a whole copy.*{'batch': 'data'}, or write "
        r"{'batch': None} if copies are wanted"
    )
    with pytest.warns(ShardingWarning, match=match):
        output = by_name(small, rules=rules)(small.features())
    assert output.data_array.sharding.spec == PartitionSpec()


def test_rules_left_out_warn_of_the_copies_that_they_make(small):
    with pytest.warns(ShardingWarning, match=r"ConstrainShardingByName was given no rules"):
        ConstrainShardingByName(small.AUTO)(small.features())


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"batch": None},
        {"rows": "data", "batch": None},
        {"rows": "data", "features": "model"},
        tensor_parallel(),
        fully_sharded(min_size=2**20),
        AxisRules({"rows": "data"}) | tensor_parallel(),
    ],
    ids=str,
)
def test_copies_that_are_wanted_are_silent(small, rules):
    by_name(small, rules=rules)(small.features())


def test_what_has_nothing_to_split_is_silent(small):
    by_name(small)({"scale": jnp.float32(1)})
    ConstrainShardingByName(make_mesh({"data": 1}, jax.devices()[:1]), {"rows": "data"})(
        small.features()
    )


def test_one_of_several_values_with_a_name_that_rules_name_is_enough(small):
    by_name(small)({"x": small.features(), "positions": pz.nx.ones({"seq": 4})})


# Options and arguments, as everywhere


def test_rules_have_two_names_and_options_are_taken(small):
    layer = ConstrainShardingByName(
        small.AUTO, rules={"batch": "data"}, on_indivisible="replicate", on_unnamed="replicate"
    )
    assert layer.axis_name_to_mesh_name == {"batch": "data"}
    odd = {"x": pz.nx.ones({"batch": 6}), "mask": jnp.ones((3, 3)), "y": pz.nx.ones({"batch": 4})}
    output = layer(odd)
    specs = [leaf.sharding.spec for leaf in jax.tree_util.tree_leaves(output)]
    assert specs == [PartitionSpec(), PartitionSpec(), PartitionSpec("data")]
    with pytest.raises(RuleTypeError, match="two names of one argument"):
        ConstrainShardingByName(small.AUTO, {"batch": "data"}, rules={"batch": "data"})
    with pytest.raises(RuleTypeError, match="on_unnamed must be 'error', 'replicate' or 'infer'"):
        ConstrainShardingByName(small.AUTO, {}, on_unnamed="skip")
    with pytest.raises(RuleTypeError, match="a mesh is needed, not Identity"):
        ConstrainShardingByName(pz.nn.Identity())
    assert dataclasses.replace(layer, on_unnamed="error").on_indivisible == "replicate"
    assert dataclasses.replace(layer) == layer
    assert layer != ConstrainShardingByName(small.AUTO, {"batch": "data"})


def test_arrays_without_names_are_left_alone_on_request(small):
    mask = jax.device_put(jnp.ones((8, 8)), NamedSharding(small.AUTO, PartitionSpec("model")))
    layer = ConstrainShardingByName(small.AUTO, {"batch": "data"}, on_unnamed="infer")
    output = layer({"x": small.features(), "mask": mask})
    assert output["mask"].sharding == mask.sharding


def test_a_constraint_without_devices_is_told_when_it_is_called_on_arrays(small):
    abstract = AbstractMesh((4, 2), ("data", "model"))
    spec = NamedSharding(abstract, PartitionSpec("data"))
    x = pz.nx.ones({"batch": 8})
    for layer in (ConstrainShardingByName(abstract, {"batch": "data"}), ConstrainSharding(spec)):
        with pytest.raises(MeshError, match=r"an AbstractMesh cannot pin arrays .*make_mesh\("):
            layer(x)
        with jax.set_mesh(make_mesh({"data": 4, "model": 2})):
            pinned = jax.jit(layer)(x)
        assert pinned.data_array.sharding.spec == PartitionSpec("data")


def test_what_lies_on_other_devices_is_refused_with_its_path():
    first, second = (
        make_mesh({"data": 4}, devices) for devices in (jax.devices()[:4], jax.devices()[4:])
    )
    x = place({"x": pz.nx.ones({"batch": 8})}, first, {"batch": "data"})
    match = (
        r"x: is on the mesh \(data=4\) of devices 0 to 3, and the constraint is for \(data=4\) "
        r"of devices 4 to 7"
    )
    for layer in (
        ConstrainShardingByName(second, {"batch": "data"}),
        ConstrainSharding(NamedSharding(second, PartitionSpec("data"))),
    ):
        with pytest.raises(MeshError, match=match):
            layer(x)
        layer(place(x, second, {"batch": "data"}))


def test_inside_a_jitted_model_a_constraint_for_other_devices_is_named():
    first, second = (make_mesh({"data": 4}, jax.devices()[i : i + 4]) for i in (0, 4))
    x = place(pz.nx.ones({"batch": 8}), first, {"batch": "data"})
    for constraint in (
        ConstrainShardingByName(second, {"batch": "data"}),
        ConstrainSharding(NamedSharding(second, PartitionSpec("data"))),
    ):
        layer = Jitted(pz.nn.Sequential([pz.nn.Identity(), constraint]))
        match = (
            rf"sublayers/1: this {type(constraint).__name__} is for the mesh data=4 of other "
            r"devices.*on a mesh data=4. Make the constraint with the mesh of the model"
        )
        with pytest.raises(MeshError, match=match):
            layer(x)


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
    planned = []
    plan = Planner.plan
    monkeypatch.setattr(
        Planner, "plan", lambda planner, tree: planned.append(tree) or plan(planner, tree)
    )
    layer = by_name(small, rules={"batch": "data", "unused": None})
    for batch in (8, 8, 4, 8):
        layer(small.features(batch))
    assert len(planned) == 2
