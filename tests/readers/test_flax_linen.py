"""What the names in boxes of Flax linen mean for a plan, and which are refused."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.core import meta
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from penzai_shard import TrainState as OwnTrainState
from penzai_shard.errors import PlanError, ShardingWarning
from penzai_shard.named_leaves import leaves_of, map_arrays
from penzai_shard.placement import place
from penzai_shard.planning import make_plan

MESH = AbstractMesh((2, 4), ("data", "model"))
RULES = {"embed": "data", "hidden": "model"}


def struct_of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def spec_of(box, rules, **options):
    (leaf,) = make_plan({"w": box}, MESH, rules, **options).leaves
    return leaf.spec


class OwnBox(nn.Partitioned):
    """A box of a user that derives from Flax's."""


class SpecBox(struct.PyTreeNode, meta.AxisMetadata):
    """A box of a user with no names, but the method by which Flax asks for them."""

    content: jax.Array

    def unbox(self):
        return self.content

    def replace_boxed(self, val):
        return self.replace(content=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self

    def get_partition_spec(self):
        return PartitionSpec("embed", "hidden")


class UnknownBox(SpecBox):
    get_partition_spec = None


# What names mean.


@pytest.mark.parametrize("kind", [nn.Partitioned, nn.LogicallyPartitioned, OwnBox])
def test_names_of_a_box_are_logical_axes(kind):
    box = kind(struct_of(8, 8), ("embed", "hidden"))
    assert spec_of(box, RULES) == P("data", "model")
    assert spec_of(box, [("hidden", "data"), ("embed", None)]) == P(None, "data")


def test_a_box_is_asked_for_its_spec_if_it_has_no_field_of_names():
    assert spec_of(SpecBox(struct_of(8, 8)), RULES) == P("data", "model")


def test_without_rules_a_name_is_a_mesh_axis():
    box = nn.Partitioned(struct_of(8, 8), (None, "model"))
    assert spec_of(box, None) == P(None, "model") == nn.get_sharding(box, MESH).spec


def test_without_rules_a_tuple_of_names_is_all_of_these_mesh_axes():
    box = nn.Partitioned(struct_of(8, 8), (("data", "model"), None))
    assert spec_of(box, None) == P(("data", "model"))
    assert nn.get_sharding(box, MESH).spec == P(("data", "model"), None)


def test_a_tuple_of_names_is_one_logical_axis_for_rules():
    box = nn.Partitioned(struct_of(8, 8), (("data", "model"), "hidden"))
    assert spec_of(box, {("data", "model"): "data", "hidden": "model"}) == P("data", "model")


def test_a_tuple_of_mesh_axes_that_no_rule_names_is_warned_of():
    box = nn.Partitioned(struct_of(8, 8), (("data", "model"), None))
    with pytest.warns(ShardingWarning, match=r"a tuple of mesh axes, which therefore stays whole"):
        assert spec_of(box, {"hidden": "model"}) == P()


def test_a_tuple_with_a_mesh_axis_that_does_not_exist_is_refused():
    box = nn.Partitioned(struct_of(8, 8), (("data", "expert"), None))
    message = r"w: logical axis \('data', 'expert'\) names mesh axes, and the mesh .* no 'expert'"
    with pytest.raises(PlanError, match=message):
        make_plan({"w": box}, MESH)


def test_a_tuple_of_names_shares_no_mesh_axis_with_another_name():
    box = nn.Partitioned(struct_of(8, 8), ("data", ("data", "model")))
    with pytest.raises(PlanError, match=r"mesh axis 'data' \(2\) is asked for twice"):
        make_plan({"w": box}, MESH)


def test_a_length_that_a_tuple_of_names_does_not_divide_is_refused():
    box = nn.Partitioned(struct_of(12, 8), (("data", "model"), None))
    with pytest.raises(
        PlanError, match=r"does not divide over mesh axes \('data', 'model'\) \(8\)"
    ):
        make_plan({"w": box}, MESH)
    assert spec_of(box, None, on_indivisible="replicate") == P()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (P("embed", "hidden"), ("embed", "hidden")),
        (["embed", "hidden"], ("embed", "hidden")),
        ((("embed",), ()), ("embed", None)),
        (([*"ab"], None), (("a", "b"), None)),
        (("embed",), ("embed", None)),
        ((), (None, None)),
        ((None, "hidden"), (None, "hidden")),
    ],
)
def test_names_are_read_as_a_partition_spec_reads_them(names, expected):
    (leaf,) = leaves_of(nn.Partitioned(struct_of(8, 8), names))
    assert leaf.names == expected


def test_a_dimension_without_name_in_the_middle_is_positional_there():
    box = nn.LogicallyPartitioned(struct_of(8, 3, 8), ("embed", None, "hidden"))
    assert spec_of(box, RULES) == P("data", None, "model")


def test_data_of_any_kind_is_planned_or_kept():
    for data in (np.ones((8, 8)), jnp.ones((8, 8)), struct_of(8, 8)):
        assert spec_of(nn.Partitioned(data, ("embed", None)), RULES) == P("data")
    seen = []
    jax.eval_shape(
        lambda w: seen.append(spec_of(nn.Partitioned(w, ("embed",)), RULES)), struct_of(8, 8)
    )
    assert seen == [P("data")]
    assert not make_plan({"w": nn.Partitioned(None, ("embed",))}, MESH, RULES).leaves
    sharding = NamedSharding(MESH, P())
    (leaf,) = leaves_of(nn.Partitioned(sharding, ("embed",)))
    assert leaf.array is sharding
    assert leaf.dtype is None


def test_placed_boxes_are_the_boxes_that_they_were(tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    box = OwnBox(np.arange(64.0).reshape(8, 8), ("embed", "hidden"))
    placed = place({"w": box}, mesh, RULES)["w"]
    assert type(placed) is OwnBox
    assert placed.names == box.names
    assert placed.value.sharding == NamedSharding(mesh, P("data", "model"))
    np.testing.assert_array_equal(placed.value, box.value)


# What is refused, whatever the options.


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (
            UnknownBox(struct_of(8, 8)),
            "w: its UnknownBox has no names that are known: it has no get_partition_spec(), by "
            "which Flax asks for them too.",
        ),
        (
            nn.Partitioned(struct_of(8, 8), "hidden"),
            "w: the names 'hidden' of its Partitioned are one text. Write a tuple with a name for "
            "each dimension: ('hidden',).",
        ),
        (
            nn.Partitioned(struct_of(8, 8), None),
            "w: its Partitioned has no names that are known",
        ),
        (
            nn.Partitioned(struct_of(8, 8), 3),
            "w: the names 3 of its Partitioned are not a tuple. Write a name, or None, for each",
        ),
        (
            nn.LogicallyPartitioned(struct_of(8, 8), ("embed", P.UNCONSTRAINED)),
            "of its LogicallyPartitioned leave a dimension to the compiler (UNCONSTRAINED), and a "
            "stored array has a layout in all of them. Write a name in its place, or None",
        ),
        (
            nn.Partitioned(struct_of(8, 8), ({"a": 1}, None)),
            "have {'a': 1} among them, which is not a name.",
        ),
        (
            nn.Partitioned(struct_of(8, 8), ("hidden", "hidden")),
            "w: its axis names ('hidden', 'hidden') have one twice. Give each dimension its own.",
        ),
        (
            nn.Partitioned(struct_of(8, 8), ("embed", "hidden", "heads")),
            "w: it has 3 axis names, ('embed', 'hidden', 'heads'), and rank 2. Give one for each "
            "dimension; what an optimizer keeps of some dimensions of a parameter is laid out",
        ),
        (
            nn.Partitioned(nn.LogicallyPartitioned(struct_of(8, 8), ("embed",)), ("hidden",)),
            "w: a LogicallyPartitioned is in a Partitioned, and both say the names of one array. "
            "Annotate its initialiser once",
        ),
    ],
)
@pytest.mark.parametrize("on_unnamed", ["error", "replicate", "infer"])
def test_a_box_whose_names_cannot_be_used_is_refused(box, message, on_unnamed):
    with pytest.raises(PlanError, match=re.escape(message)):
        make_plan({"w": box}, MESH, RULES, on_unnamed=on_unnamed)


def test_all_boxes_that_are_refused_are_reported():
    tree = {"a": nn.Partitioned(struct_of(8), "x"), "b": nn.Partitioned(struct_of(8), ("x", "y"))}
    with pytest.raises(PlanError) as caught:
        make_plan(tree, MESH, RULES)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["a", "b"]


def test_a_box_with_a_mesh_of_its_own_is_laid_out_on_that_mesh_alone():
    own = AbstractMesh((8, 1), ("data", "model"))
    box = nn.Partitioned(struct_of(8, 8), ("embed",), mesh=own)
    assert make_plan({"w": box}, own, RULES).leaves[0].spec == P("data")
    message = (
        r"w: it has a mesh of its own \(data=8, model=1\), .* another one \(data=2, model=4\). "
        r"Leave mesh= out where it is annotated, or give that mesh here"
    )
    with pytest.raises(PlanError, match=message):
        make_plan({"w": box}, MESH, RULES)


def test_in_a_train_state_boxes_have_meshes_and_rules_of_their_own_too():
    own, key = AbstractMesh((8, 1), ("data", "model")), jax.random.key(0)
    rules = (("embed", "model"), ("hidden", "data"))
    tree = {
        "a": nn.Partitioned(struct_of(8, 8), ("embed",), mesh=own),
        "b": nn.LogicallyPartitioned(struct_of(8, 8), ("embed", "hidden"), rules=rules),
        "c": nn.LogicallyPartitioned(struct_of(8, 8), ("embed", "hidden")),
    }
    state = OwnTrainState.initial_state(tree, optax.sgd(0.1), key, trainable=lambda _: True)
    with pytest.raises(PlanError) as caught:
        make_plan(state, MESH, {"embed": "data"})
    of_mesh, of_rules = caught.value.problems
    assert of_mesh.startswith("params/a: it has a mesh of its own (data=8, model=1)")
    assert of_rules.startswith("params/b: it has rules of its own")
    del tree["a"]
    state = OwnTrainState.initial_state(tree, optax.sgd(0.1), key, trainable=lambda _: True)
    specs = {leaf.path: leaf.spec for leaf in make_plan(state, MESH, rules).leaves}
    assert specs["params/b"] == specs["params/c"] == P("model", "data")


def test_a_box_with_rules_of_its_own_is_laid_out_as_they_say():
    own = (("embed", "model"), ("hidden", None))
    box = nn.LogicallyPartitioned(struct_of(8, 8), ("embed", "hidden"), rules=own)
    assert spec_of(box, own) == P("model")
    assert spec_of(box, {"embed": "model"}) == P("model")
    message = (
        r"w: it has rules of its own, .* they give P\('model',\), and these rules give "
        r"P\('data', 'model'\). Leave them out where it is annotated, or give the same rules "
        r"here: rules=\(\('embed', 'model'\), \('hidden', None\)\)"
    )
    with pytest.raises(PlanError, match=message):
        make_plan({"w": box}, MESH, RULES)
    elsewhere = box.replace(rules=(("embed", "expert"),))
    with pytest.raises(PlanError, match=r"they cannot be read \(.*no mesh axis 'expert'"):
        make_plan({"w": elsewhere}, MESH, RULES)


# What optimizers keep, in boxes that have the names of their parameters.


def train_state(optimizer):
    def init():
        params = {
            "kernel": nn.LogicallyPartitioned(jnp.ones((16, 256)), ("embed", "hidden")),
            "heads": nn.LogicallyPartitioned(jnp.ones((256, 3, 256)), ("hidden", None, "embed")),
            "bias": nn.LogicallyPartitioned(jnp.ones(256), ("hidden",)),
        }
        return TrainState.create(apply_fn=len, params=params, tx=optimizer)

    return jax.eval_shape(init)


def specs_by_path(tree, **options):
    return {leaf.path: leaf.spec for leaf in make_plan(tree, MESH, RULES, **options).leaves}


KERNEL, HEADS, BIAS = P("data", "model"), P("model", None, "data"), P("model")


@pytest.mark.parametrize(
    ("optimizer", "prefix"),
    [
        (optax.adam(1e-3), "opt_state/0/mu/"),
        (
            optax.multi_transform(
                {"a": optax.adam(1e-3), "b": optax.sgd(1e-3)},
                lambda params: {"kernel": "a", "heads": "a", "bias": "a"},
            ),
            "opt_state/inner_states/a/inner_state/0/nu/",
        ),
    ],
)
def test_moments_are_laid_out_as_their_parameters(optimizer, prefix):
    specs = specs_by_path(train_state(optimizer))
    moments = [specs[f"{prefix}{name}"] for name in ("kernel", "heads", "bias")]
    assert moments == [specs[f"params/{name}"] for name in ("kernel", "heads", "bias")]
    assert moments == [KERNEL, HEADS, BIAS]
    assert specs["step"] == P()


def test_parameters_that_are_masked_out_have_no_moments():
    mask = {"kernel": True, "heads": False, "bias": True}
    specs = specs_by_path(train_state(optax.masked(optax.adam(1e-3), mask)))
    assert specs["opt_state/inner_state/0/mu/kernel"] == KERNEL
    assert not [path for path in specs if path.startswith("opt_state") and "heads" in path]


def test_statistics_of_some_dimensions_are_laid_out_as_these():
    specs = specs_by_path(train_state(optax.adafactor(1e-3, min_dim_size_to_factor=16)))
    prefix = "opt_state/0/"
    # The longest dimension is left out of rows, the second longest of columns.
    assert specs[f"{prefix}v_row/kernel"] == P("data")
    assert specs[f"{prefix}v_col/kernel"] == P("model")
    assert specs[f"{prefix}v/kernel"] == P()
    assert specs[f"{prefix}v_row/heads"] == P("model")
    assert specs[f"{prefix}v_col/heads"] == P(None, "data")
    assert specs[f"{prefix}v/bias"] == P("model")
    assert specs[f"{prefix}v_row/bias"] == P()


def test_one_statistic_for_each_dimension_is_laid_out_as_that_dimension():
    specs = specs_by_path(train_state(optax.sm3(1e-3)))
    kept = [specs[f"opt_state/0/mu/heads/{dimension}"] for dimension in range(3)]
    assert kept == [P("model"), P(), P("data")]
    assert specs["opt_state/0/nu/heads"] == HEADS


def test_a_statistic_that_is_not_made_of_its_parameters_dimensions_is_refused_or_copied():
    state = train_state(optax.adam(1e-3))
    odd = state.replace(opt_state={"kernel": state.params["kernel"].replace(value=struct_of(7))})
    message = (
        r"opt_state/kernel: its logical axes \(embed=16, hidden=256\) do not fit its data of "
        r'shape \(7,\). .*, or pass on_unnamed="replicate"'
    )
    with pytest.raises(PlanError, match=message):
        make_plan(odd, MESH, RULES)
    assert specs_by_path(odd, on_unnamed="replicate")["opt_state/kernel"] == P()


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (
            optax.adafactor(1e-3, min_dim_size_to_factor=2),
            {
                "0/v_row/heads": P(None, "data"),
                "0/v_col/heads": P("model"),
                "0/v_row/last": P(),
                "0/v_col/last": P("data"),
            },
        ),
        (
            optax.sm3(1e-3),
            {"0/mu/heads/0": P("model"), "0/mu/heads/1": P(), "0/mu/heads/2": P("data")},
        ),
    ],
)
def test_statistics_of_positional_dimensions_in_this_librarys_train_state(optimizer, found):
    def init():
        model = {
            "heads": nn.LogicallyPartitioned(jnp.ones((256, 3, 64)), ("hidden", None, "embed")),
            "last": nn.LogicallyPartitioned(jnp.ones((128, 256)), (None, "embed")),
        }
        return OwnTrainState.initial_state(model, optimizer, jax.random.key(0))

    plan = make_plan(jax.eval_shape(init), MESH, RULES)
    specs = {leaf.path: leaf.spec for leaf in plan.leaves}
    assert {path: specs[f"opt_state/{path}"] for path in found} == found


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.adafactor(1e-3, min_dim_size_to_factor=16), r"v_row/kernel: it has 2 axis names"),
        (optax.sm3(1e-3), r"kernel/0: several arrays are in the place of one.*train state"),
    ],
)
def test_statistics_without_their_parameters_are_refused(optimizer, message):
    with pytest.raises(PlanError, match=message):
        make_plan(train_state(optimizer).opt_state, MESH, RULES)


def test_boxes_are_kept_where_arrays_are_replaced():
    tree = {"w": nn.LogicallyPartitioned(struct_of(8, 8), ("embed", "hidden"))}
    mapped = map_arrays(tree, lambda leaf: leaf.shape)
    assert mapped == {"w": nn.LogicallyPartitioned((8, 8), ("embed", "hidden"))}
