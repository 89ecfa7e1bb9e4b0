"""Parameters by path: in memory, and restored onto any mesh, into any kind of model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.toolshed import lora

import penzai_shard as pzs
from penzai_shard.arrays.structure import flatten
from tests.models import counted_mlp, model, penzai_mlp, uninitialized_mlp_v1

WIDE, TALL, FLAT = (pzs.make_mesh({"data": n, "model": 8 // n}) for n in (4, 2, 8))
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"))
RELAXED = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
RULES = {"embedding": "data", "embed": "data", "features": "data", "mlp": "model"}
LIBRARIES = ["counted mlp", "v1 mlp", "linen", "nnx", "haliax linear", "equinox", "plain"]
SCALAR = jax.ShapeDtypeStruct((), "float32")
STATE_WITHOUT_VALUE = pz.StateVariableValue(label="count", value=SCALAR, metadata={})
FIRST, BIASES = "mlp/Affine_0/**", "**/*.bias"


def numbers(value):
    data = getattr(value, "data_array", value)
    is_key = jnp.issubdtype(getattr(data, "dtype", int), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(data) if is_key else data)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert getattr(found[path], "named_shape", ()) == getattr(value, "named_shape", ())
        np.testing.assert_array_equal(numbers(found[path]), numbers(value), err_msg=path)


def assert_lies(restored, mesh, rules, **options):
    """Every array, also of state variables, lies as planned."""
    plan = pzs.make_plan(restored, mesh, rules, **options)
    for leaf, planned in zip(flatten(restored)[0], plan.leaves, strict=True):
        assert leaf.value.sharding == planned.sharding, leaf.path


def blank(tree):
    """The tree with zeros for numbers."""
    leaves, structure = flatten(tree)
    values = [leaf.value for leaf in leaves]
    return structure.fill_alike(
        [
            x
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else np.zeros(leaf.shape, leaf.dtype)
            for x, leaf in zip(values, leaves, strict=True)
        ]
    )


def is_variable(value):
    return isinstance(value, pz.Parameter | pz.ParameterValue | pz.StateVariable)


def variables(tree):
    return list(filter(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return pzs.save_params(tmp_path_factory.mktemp("saved") / "mlp", model("penzai mlp"))


# In memory


def test_with_params_first_api():
    definition = uninitialized_mlp_v1()
    params = pzs.param_dict(model("v1 mlp"))
    by_hand = (
        pz_v1.select(definition)
        .at_instances_of(pz_v1.nn.UninitializedParameter)
        .apply(lambda parameter: parameter.initialize_with_value(params[parameter.name]))
    )
    filled = pzs.with_params(definition, params)
    assert jax.tree.structure(filled) == jax.tree.structure(by_hand)
    jax.tree.map(np.testing.assert_array_equal, filled, by_hand)


def test_with_params_differences():
    params = pzs.param_dict(model("penzai mlp"))
    first, second, *_ = params
    changed = {**params, second: pz.nx.ones({"other": 3}), "more": pz.nx.ones({"a": 2})}
    del changed[first]
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.with_params(model("penzai mlp"), changed)
    found = {problem.path: problem.kind for problem in caught.value.problems}
    assert found == {first: "missing", second: "axes", "more": "extra"}


@pytest.mark.parametrize("given", [jnp.ones(2), {}, len, {"w": NamedSharding(WIDE, P())}])
def test_param_dict_refuses_what_has_no_parameters(given):
    with pytest.raises(pzs.RuleTypeError):
        pzs.param_dict(given)


# Onto any mesh


@settings(max_examples=8)
@given(*[st.sampled_from([WIDE, TALL, FLAT])] * 2, *[st.permutations(["data", "model", None])] * 2)
def test_restore_params_every_mesh_to_every_mesh(tmp_path_factory, first, second, before, after):
    weights = {"w": pz.nx.wrap(jnp.arange(512.0).reshape(8, 8, 8), "a", "b", "c")}
    rules = [dict(zip("abc", axes, strict=True)) for axes in (before, after)]
    path = tmp_path_factory.mktemp("meshes") / "params"
    pzs.save_params(path, pzs.place(weights, first, rules[0]))
    restored = pzs.restore_params(path, blank(weights), second, rules[1])
    assert_same(restored, weights)
    assert_lies(restored, second, rules[1])


@pytest.mark.parametrize("name", LIBRARIES)
def test_restore_params_of_every_library(tmp_path, name):
    path = pzs.save_params(tmp_path / "params", model(name))
    given = blank(model(name))
    before = [leaf.value for leaf in flatten(given)[0]]
    restored = pzs.restore_params(path, given, WIDE, RULES, **RELAXED)
    assert_same(pzs.param_dict(restored), pzs.param_dict(model(name)))
    assert_lies(restored, WIDE, RULES, **RELAXED)
    assert all(a is leaf.value for a, leaf in zip(before, flatten(given)[0], strict=True))
    assert_same(pzs.param_dict(pzs.with_params(given, restored)), pzs.param_dict(restored))


def test_restore_params_variables(tmp_path):
    one = counted_mlp()
    frozen = pz.select(one).at_instances_of(pz.nn.Affine).pick_nth_selected(0)
    given = [frozen.apply(pz.freeze_params), one.count]
    path = pzs.save_params(tmp_path / "params", model("penzai mlp"))
    restored = pzs.restore_params(path, given, WIDE, {})
    assert restored[1] is restored[0].count is not one.count
    assert list(map(type, variables(restored))) == list(map(type, variables(given)))
    assert len(set(map(type, variables(restored)))) == 3
    # Nothing of the given model goes when the restored one is donated.
    jax.tree.map(lambda array: array.delete(), pz.freeze_variables(restored))
    assert int(one.count.value) == 0


@pytest.mark.parametrize("build", [penzai_mlp, uninitialized_mlp_v1])
def test_restore_params_abstract_model(tmp_path, build):
    source = model("penzai mlp" if build is penzai_mlp else "v1 mlp")
    path = pzs.save_params(tmp_path / "params", source)
    like = build() if build is uninitialized_mlp_v1 else pzs.abstract_model(build)
    restored = pzs.restore_params(path, like, TALL, RULES)
    assert_same(pzs.param_dict(restored), pzs.param_dict(source))
    assert all(isinstance(variable, pz.Parameter) for variable in variables(restored))


def test_restore_params_without_mesh(saved):
    placed = pzs.place(blank(model("penzai mlp")), TALL, {"features": "data"})
    structs = pzs.make_plan(placed, TALL, {"features": "data"}).restore_structs()
    for like in (placed, structs):
        restored = pzs.restore_params(saved, like)
        assert_same(pzs.param_dict(restored), pzs.param_dict(model("penzai mlp")))
        assert_lies(restored, TALL, {"features": "data"})
    abstract = pzs.make_mesh({"data": 8}, abstract=True)
    with pytest.raises(pzs.MeshError):
        pzs.restore_params(saved, pzs.make_plan(placed, abstract, {}).restore_structs())


def test_restore_params_plan_and_explicit_mesh(saved):
    given = model("penzai mlp")
    plan = pzs.make_plan(given, TALL, RULES, on_indivisible="replicate")
    for arguments in ({"plan": plan}, {"mesh": plan}):
        assert_lies(pzs.restore_params(saved, given, **arguments), TALL, RULES)
    with jax.set_mesh(EXPLICIT):
        restored = pzs.restore_params(saved, given, EXPLICIT, RULES)
        assert_same(pzs.param_dict(restored), pzs.param_dict(given))
    assert_lies(restored, EXPLICIT, RULES)


def test_restore_params_of_a_train_state(tmp_path, saved):
    params = pzs.param_dict(model("penzai mlp"))
    path = pzs.save_train_state(tmp_path / "state", {"step": 3, "params": params, "opt_state": 1})
    assert_same(pzs.restore_params(path, blank(params)), params)


def test_restore_params_names_on_one_side(tmp_path):
    bare, named = {"w": np.arange(8.0)}, {"w": pz.nx.ones({"a": 8})}
    path = pzs.save_params(tmp_path / "bare", bare)
    with pytest.warns(pzs.ShardingWarning):
        restored = pzs.restore_params(path, named, WIDE, {"a": "data"})
    np.testing.assert_array_equal(restored["w"].data_array, bare["w"])
    assert isinstance(pzs.restore_params(path, bare)["w"], jax.Array)


# Parts


@pytest.mark.parametrize(
    ("options", "count"), [({"only": FIRST}, 2), ({"except_": BIASES}, 2), ({"only": "**"}, 4)]
)
def test_save_params_and_restore_params_parts(tmp_path, options, count):
    ones = jax.tree.map(jnp.ones_like, pzs.param_dict(model("penzai mlp")))
    given = blank(model("penzai mlp"))
    whole = pzs.save_params(tmp_path / "whole", ones)
    part = pzs.save_params(tmp_path / "part", ones, **options)
    # Of the whole a part is read, of the part all that is there.
    for path, chosen in ((whole, options), (part, {})):
        restored = pzs.param_dict(pzs.restore_params(path, given, others="keep", **chosen))
        assert sum(numbers(value).all() for value in restored.values()) == count


def test_restore_params_part_that_is_not_stored(tmp_path, saved):
    path = pzs.save_params(tmp_path / "part", model("penzai mlp"), except_=BIASES)
    for where, like, options in (
        (path, model("penzai mlp"), {"only": FIRST}),
        (saved, {"other": jnp.ones(2)}, {"allow": "extra"}),
    ):
        with pytest.raises(pzs.CheckpointMismatchError) as caught:
            pzs.restore_params(where, like, others="keep", **options)
        assert {problem.kind for problem in caught.value.problems} == {"missing"}


def test_restore_params_base_below_adapters(saved):
    adapted = lora.loraify_linears_in_selection(
        pz.select(blank(model("penzai mlp"))), 2, jax.random.key(0)
    )
    restored = pzs.param_dict(pzs.restore_params(saved, adapted, WIDE, RULES, others="keep"))
    assert_same(restored, pzs.param_dict(adapted) | pzs.param_dict(model("penzai mlp")))


@pytest.mark.parametrize(
    ("options", "error", "path"),
    [
        ({"only": FIRST}, pzs.CheckpointMismatchError, "mlp/Affine_1/AddBias.bias"),
        ({"only": "nothing/**"}, pzs.SelectionError, "nothing/**"),
        ({"except_": "**/*"}, pzs.SelectionError, ""),
        ({"others": "kept"}, pzs.RuleTypeError, "others"),
        ({"allow": "transposed"}, pzs.RuleTypeError, "allow"),
        ({"names": {"w": 1}}, pzs.RuleTypeError, "names"),
        ({"rename_axes": {"featurs": "x"}}, pzs.CheckpointMismatchError, ""),
    ],
)
def test_restore_params_refuses_options(saved, options, error, path):
    with pytest.raises(error) as caught:
        pzs.restore_params(saved, model("penzai mlp"), **options)
    assert path in [problem.path for problem in caught.value.problems]
    assert all(problem.fix for problem in caught.value.problems)


def test_restore_params_keeps_only_values(saved):
    abstract = pzs.abstract_model(penzai_mlp)
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_params(saved, abstract, WIDE, RULES, only=FIRST, others="keep")
    assert {problem.kind for problem in caught.value.problems} == {"missing"}
    with pytest.raises(pzs.ShardingError) as caught:
        pzs.restore_params(saved, [abstract, STATE_WITHOUT_VALUE], WIDE, RULES)
    assert [problem.path for problem in caught.value.problems] == ["count"]
