"""What a plan says is what happens, whoever carries it out; a plan of another tree is refused."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.models import simple_mlp
from penzai.models.transformer.variants.llamalike_common import AttentionTypeGlobalCausal

import penzai_shard as pzs
from penzai_shard.errors import PlanError
from tests.model_families import transformer

MESH = pzs.make_mesh({"data": 4, "model": 2})
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
SIZES = {"data": 4, "model": 2}


def shard_shapes(array):
    return {shard.data.shape for shard in array.addressable_shards}


# Every family of Penzai, with the defaults of every function


def mlp(key):
    return simple_mlp.DropoutMLP.from_config(
        name="mlp", init_base_rng=key, feature_sizes=[8, 16, 4], drop_rate=0.5
    )


def one_block(family, **options):
    return functools.partial(transformer, family, num_decoder_blocks=1, vocab_size=12, **options)


FAMILIES = {
    "llama": one_block("llama"),
    "mistral": one_block("mistral"),
    "gemma": one_block("gemma_2", num_kv_heads=1, attention_type=AttentionTypeGlobalCausal()),
    "stacked llama": one_block("llama", use_layer_stack=True),
    "gpt_neox": one_block("gpt_neox"),
    "mlp": mlp,
}
RULES = {"embedding": "data", "neurons": "model", "vocabulary": "model", "features_out": "model"}


def expected_shard_shape(named_array):
    """By arithmetic alone: each named dimension over the mesh axis of its rule."""
    return tuple(
        size // SIZES.get(RULES.get(name), 1) for name, size in named_array.named_axes.items()
    )


def assert_lies_by_the_rules(model):
    variables = pz.unbind_params(model, freeze=True)[1]
    values = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
    assert variables or values
    for variable in (*variables, *values):
        array = variable.value.data_array
        assert shard_shapes(array) == {expected_shard_shape(variable.value)}, variable.label
        assert array.sharding.device_set == set(MESH.devices.flat)
    for leaf in jax.tree.leaves(pz.freeze_variables(model)):
        assert leaf.sharding.device_set == set(MESH.devices.flat)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_laid_out_alike_by_every_function(family):
    build, key = FAMILIES[family], jax.random.key(0)
    plan = pzs.make_plan(pzs.abstract_model(build, key), MESH, RULES)
    built = pzs.sharded_init(build, key, plan=plan)
    model = pzs.place(built, MESH, {})
    own = pzs.make_plan(model, MESH, RULES)
    assert {leaf.path: leaf.spec for leaf in own.leaves} == {
        leaf.path: leaf.spec for leaf in plan.leaves
    }
    for placed in (
        built,
        pzs.place(model, MESH, RULES),
        pzs.place(model, plan),
        pzs.name_to_name_device_put(model, EXPLICIT, RULES),
        jax.device_put(pz.freeze_variables(model), own.sharding_tree()),
        jax.device_put(pz.freeze_variables(model), pzs.name_to_name_sharding(model, MESH, RULES)),
    ):
        assert_lies_by_the_rules(placed)


def test_a_mask_without_names_is_placed_on_request_by_every_function():
    def build(key):
        masked = jnp.tril(jnp.ones((4, 4), bool))
        linear = pz.nn.Linear.from_config("up", key, {"embedding": 8}, {"neurons": 16})
        return pz.nn.Sequential([linear, Masked(masked)])

    key = jax.random.key(0)
    match = r"\(4, 4\) has no logical axis names"
    relaxed = {"rules": RULES, "on_unnamed": "replicate"}
    plan = pzs.make_plan(pzs.abstract_model(build, key), MESH, **relaxed)
    model = build(key)
    for call in (
        lambda **more: pzs.place(model, MESH, **more),
        lambda **more: pzs.name_to_name_device_put(model, MESH, **more),
        lambda **more: pzs.sharded_init(build, key, mesh=MESH, **more),
    ):
        with pytest.raises(PlanError, match=match):
            call(rules=RULES)
        mask = call(**relaxed).sublayers[1].mask
        assert mask.sharding == NamedSharding(MESH, P())
    for placed in (pzs.place(model, plan), pzs.sharded_init(build, key, plan=plan)):
        assert placed.sublayers[1].mask.sharding == NamedSharding(MESH, P())


@pz.pytree_dataclass
class Masked(pz.nn.Layer):
    mask: jax.Array

    def __call__(self, value, /, **side_inputs):
        return value


# Relaxed modes


def odd_tree():
    return {
        "odd": pz.nx.wrap(np.arange(24.0, dtype=np.float32).reshape(6, 4)).tag("a", "b"),
        "mask": np.ones((3, 3), np.float32),
        "even": pz.nx.wrap(np.arange(8.0, dtype=np.float32)).tag("a"),
    }


@pytest.mark.parametrize("on_unnamed", ["replicate", "infer"])
def test_what_was_relaxed_in_the_plan_is_relaxed_in_the_act(on_unnamed):
    rules = {"a": "data", "b": "model"}
    plan = pzs.make_plan(odd_tree(), MESH, rules, on_indivisible="replicate", on_unnamed=on_unnamed)
    for placed in (
        pzs.place(odd_tree(), plan),
        pzs.sharded_init(lambda: jax.tree.map(jnp.asarray, odd_tree()), plan=plan),
        pzs.shard_batch(odd_tree(), plan=plan),
        jax.device_put(odd_tree(), plan.sharding_tree()),
    ):
        assert shard_shapes(placed["odd"].data_array) == {(6, 2)}
        assert shard_shapes(placed["even"].data_array) == {(2,)}
        if on_unnamed == "replicate":
            assert placed["mask"].sharding == NamedSharding(MESH, P())
        for name, given in odd_tree().items():
            data = given.data_array if name != "mask" else given
            np.testing.assert_array_equal(jax.tree.leaves(placed[name])[0], data)


def test_every_leaf_of_a_plan_is_what_one_device_holds():
    plan = pzs.make_plan(odd_tree(), MESH, {"b": "model"}, on_unnamed="replicate")
    placed = pzs.place(odd_tree(), plan)
    for leaf in plan.leaves:
        (array,) = jax.tree.leaves(placed[leaf.path])
        assert shard_shapes(array) == {leaf.shard_shape}
        assert {shard.data.nbytes for shard in array.addressable_shards} == {leaf.bytes_per_device}


# Plans fit trees with the same arrays


def parts(dtype=jnp.float32, label="w", names=("a", "b"), shape=(8, 4)):
    return {
        "named": pz.nx.wrap(jnp.ones(shape, dtype)).tag(*names),
        "parameter": pz.Parameter(value=pz.nx.wrap(jnp.ones((8, 8))).tag("a", "c"), label=label),
        "state": pz.StateVariable(value=pz.nx.wrap(jnp.ones(8)).tag("a")),
        "list": [pz.nx.wrap(jnp.ones(4)).tag("b"), jnp.ones(())],
        "view": pz.nx.wrap(jnp.ones((4, 8))).tag("b", "a").untag("b"),
    }


def replaced(**more):
    return parts() | more


def named(array, *names):
    return pz.nx.wrap(array).tag(*names)


def with_variables_frozen():
    return pz.freeze_variables(parts())


def as_structs():
    return jax.eval_shape(with_variables_frozen)


def parameter(value=None, label="w", kind=pz.Parameter, **more):
    value = named(jnp.ones((8, 8)), "a", "c") if value is None else value
    return kind(value=value, label=label, **more)


def twice():
    shared = parts()["parameter"]
    return replaced(parameter=[shared, {"again": shared}])


HARMLESS = {
    "the same": parts,
    "other values": lambda: jax.tree.map(lambda x: x * 3, with_variables_frozen()),
    "frozen variables": with_variables_frozen,
    "an array of numpy": lambda: replaced(named=named(np.ones((8, 4), np.float32), "a", "b")),
    "keys of the dictionary in another order": lambda: dict(reversed(parts().items())),
    "an ordered dictionary": lambda: collections.OrderedDict(parts()),
    "a tuple instead of a list": lambda: replaced(list=tuple(parts()["list"])),
    "a parameter with metadata": lambda: replaced(parameter=parameter(metadata={"frozen": 1})),
    "a parameter elsewhere": lambda: (
        {"parameter": None, "moved": parameter()}
        | {k: v for k, v in parts().items() if k != "parameter"}
    ),
    "a frozen parameter": lambda: replaced(parameter=parts()["parameter"].freeze()),
    "a parameter at two places": twice,
    "a frozen parameter at two places": lambda: pz.freeze_variables(twice()),
    "another automatic label": parts,
    "placed on the mesh": lambda: pzs.place(with_variables_frozen(), MESH, {"a": "data"}),
    "placed on an Explicit mesh": lambda: replaced(
        named=named(jax.device_put(jnp.ones((8, 4)), NamedSharding(EXPLICIT, P("data"))), "a", "b")
    ),
    "placed on four devices": lambda: replaced(
        named=pzs.place(parts()["named"], pzs.make_mesh({"x": 4}, jax.devices()[4:]), {"a": "x"})
    ),
    "a Python number": lambda: replaced(list=[parts()["list"][0], 1.0]),
    "an empty place more": lambda: parts() | {"nothing": None, "none": []},
    "a function more": lambda: parts() | {"activation": jax.nn.relu},
    "a view of the same dimensions": lambda: replaced(
        named=pz.nx.NamedArrayView(
            data_shape=(8, 4),
            data_axis_for_logical_axis=(),
            data_axis_for_name={"b": 1, "a": 0},
            data_array=jnp.ones((8, 4)),
        )
    ),
}

MORE, LESS = "is in the tree and not in the plan", "is in the plan and not in the tree"


def instead(array):
    """The tree with another array in place of the one called ``named``."""
    return lambda: replaced(named=array)


OTHER = {
    "an array less": (lambda: {k: v for k, v in parts().items() if k != "named"}, f"named: {LESS}"),
    "an array more": (lambda: parts() | {"more": named(jnp.ones(8), "a")}, f"more: {MORE}"),
    "a scalar more": (lambda: parts() | {"more": 1.0}, f"more: {MORE}"),
    "a text more": (lambda: parts() | {"more": "text"}, f"more: {MORE}"),
    "another name": (
        instead(named(jnp.ones((8, 4)), "a", "x")),
        r"named: is \[a=8, b=4\] in the plan and \[a=8, x=4\] in the tree",
    ),
    "another shape": (
        instead(named(jnp.ones((8, 6)), "a", "b")),
        r"named: is \[a=8, b=4\] in the plan and \[a=8, b=6\] in the tree",
    ),
    "another dtype": (
        instead(named(jnp.ones((8, 4), jnp.bfloat16), "a", "b")),
        r"named: is float32\[a=8, b=4\] in the plan and bfloat16\[a=8, b=4\] in the tree",
    ),
    "whole numbers": (
        instead(named(jnp.ones((8, 4), int), "a", "b")),
        r"and int32\[a=8, b=4\] in the tree",
    ),
    "dimensions in another order": (
        instead(named(jnp.ones((4, 8)), "b", "a")),
        r"and \[b=4, a=8\] in the tree",
    ),
    "names that are swapped": (
        lambda: replaced(parameter=parameter(named(jnp.ones((8, 8)), "c", "a"))),
        r"w: is \[a=8, c=8\] in the plan and \[c=8, a=8\] in the tree",
    ),
    "a dimension more": (
        instead(named(jnp.ones((8, 4, 1)), "a", "b", "c")),
        r"and \[a=8, b=4, c=1\] in the tree",
    ),
    "a dimension less": (instead(named(jnp.ones(8), "a")), r"and \[a=8\] in the tree"),
    "a dimension untagged": (
        instead(named(jnp.ones((4, 8)), "b", "a").untag("b")),
        r"and \[4, a=8\] in the tree",
    ),
    "a view tagged": (
        lambda: replaced(view=named(jnp.ones((4, 8)), "b", "a")),
        r"view: is \[4, a=8\] in the plan and \[b=4, a=8\] in the tree",
    ),
    "no names": (instead(jnp.ones((8, 4))), r"and \[8, 4\] without names in the tree"),
    "names for a scalar": (
        lambda: replaced(list=[parts()["list"][0], named(jnp.ones(1), "z")]),
        r"list/1: is \[\] without names in the plan and \[z=1\] in the tree",
    ),
    "another key": (
        lambda: {("other" if k == "named" else k): v for k, v in parts().items()},
        f"other: {MORE}",
    ),
    "another label": (lambda: parts(label="v"), rf"v: {MORE}\.\n  w: {LESS}"),
    "one list element more": (
        lambda: replaced(list=[*parts()["list"], 1.0]),
        f"list/2: {MORE}",
    ),
    "one level deeper": (lambda: {"model": parts()["list"]}, f"model/0: {MORE}"),
    "one array alone": (lambda: parts()["named"], f"the array: {MORE}"),
    "an empty tree": (dict, f"list/0: {LESS}"),
    "state with another name": (
        lambda: replaced(state=pz.StateVariable(value=named(jnp.ones(8), "q"))),
        r"state: is \[a=8\] in the plan and \[q=8\] in the tree",
    ),
    "a parameter twice, once another": (
        lambda: replaced(parameter=[parameter(), parameter(named(jnp.ones((8, 2)), "a", "c"))]),
        r"w: is \[a=8, c=8\] in the plan and \[a=8, c=2\] in the tree",
    ),
}


@pytest.fixture(scope="module", params=["concrete", "abstract", "twice"])
def plan_of_parts(request):
    tree = {"concrete": parts, "abstract": as_structs, "twice": twice}[request.param]()
    return pzs.make_plan(tree, MESH, {"a": "data", "b": "model"})


EXPECTED = {"named": (2, 2), "parameter": (2, 8), "state": (2,), "list": (2,), "view": (4, 2)}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_plan_fits_a_tree_with(name, plan_of_parts):
    placed = pz.freeze_variables(pzs.place(HARMLESS[name](), plan_of_parts))
    place_of = {"parameter": "moved"} if "moved" in placed else {}
    for key, shape in EXPECTED.items():
        array = jax.tree.leaves(placed[place_of.get(key, key)])[0]
        assert shard_shapes(array) == {shape}


@pytest.mark.parametrize("name", OTHER)
def test_a_plan_does_not_fit_a_tree_with(name):
    build, match = OTHER[name]
    plan = pzs.make_plan(parts(), MESH, {"a": "data", "b": "model"})
    headline = r"^place: the plan was made for another tree. Plan this one: make_plan\(tree, ...\)"
    with pytest.raises(PlanError, match=headline) as caught:
        pzs.place(build(), plan)
    with pytest.raises(PlanError, match=match):
        raise caught.value


def test_all_differences_are_reported_at_once():
    plan = pzs.make_plan(parts(), MESH, {"a": "data"})
    with pytest.raises(PlanError) as caught:
        pzs.sharded_init(lambda: {"new": jnp.ones(()), "named": named(jnp.ones(8), "a")}, plan=plan)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "named", "new", "list/0", "list/1", "w", "state", "view"
    ]  # fmt: skip


def test_a_plan_of_an_abstract_state_fits_the_state():
    def initial():
        return pzs.TrainState.initial_state(mlp(key), optax.adam(1e-3), key)

    key = jax.random.key(0)
    plan = pzs.make_plan(jax.eval_shape(initial), MESH, {"features_out": "model"})
    state = initial()
    placed = pzs.place(state, plan)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    moments = placed.opt_state[0].mu
    for tree in (placed.params, moments):
        weights = tree["mlp/Affine_0/Linear.weights"].data_array
        assert shard_shapes(weights) == {(8, 8)}
    for one, other in zip(jax.tree.leaves(placed), jax.tree.leaves(state), strict=True):
        assert one.sharding.device_set == set(MESH.devices.flat)
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(PlanError, match=r"opt_state.*is in the plan and not in the tree"):
        pzs.place(initial().model, plan)


def test_the_bytes_of_a_plan_are_the_bytes_on_each_device():
    plan = pzs.make_plan(parts(), MESH, {"a": "data", "b": "model"})
    placed = pz.freeze_variables(pzs.place(parts(), plan))
    held = collections.Counter()
    for array in jax.tree.leaves(placed):
        for shard in array.addressable_shards:
            held[shard.device] += math.prod(shard.data.shape) * array.dtype.itemsize
    assert set(held.values()) == {plan.bytes_per_device}


def test_a_tied_parameter_counts_once_in_an_abstract_plan_too():
    build, key = FAMILIES["gemma"], jax.random.key(0)
    abstract = pzs.abstract_model(build, key)
    plan = pzs.make_plan(abstract, MESH, RULES)
    paths = [leaf.path for leaf in plan.leaves]
    assert paths.count("transformer/embedder.embeddings") == 1
    rebuilt = jax.tree.map(lambda leaf: leaf, abstract)
    assert pzs.make_plan(rebuilt, MESH, RULES).bytes_per_device == plan.bytes_per_device
    structs = {p.label: p.value.data_array for p in pz.unbind_params(abstract)[1]} or {
        p.label: p.value.data_array
        for p in pz.select(abstract).at_instances_of(pz.ParameterValue).get_sequence()
    }
    others = sum(leaf.dtype.itemsize for leaf in plan.leaves if leaf.path not in structs)
    assert plan.total_bytes - others == sum(x.size * x.dtype.itemsize for x in structs.values())


def test_a_mutable_model_is_placed_by_place_and_by_device_put_once_frozen():
    model = mlp(jax.random.key(0))
    plan = pzs.make_plan(model, MESH, {"features_out": "model"})
    with pytest.raises(TypeError, match="Parameter"):
        jax.device_put(model, plan.sharding_tree())
    assert "place(model, plan)" in pzs.ShardingPlan.sharding_tree.__doc__
    one = jax.device_put(pz.freeze_variables(model), plan.sharding_tree())
    other = pz.freeze_variables(pzs.place(model, plan))
    assert [x.sharding for x in jax.tree.leaves(one)] == [
        x.sharding for x in jax.tree.leaves(other)
    ]
