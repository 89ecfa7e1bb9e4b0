"""Parameters by path: in memory, and restored onto any mesh, into any kind of model."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.toolshed import lora

import penzai_shard as pzs
from penzai_shard.arrays.structure import flatten, leaves_of
from tests.checkpoints import trees
from tests.checkpoints.trees import blank, params
from tests.models import MODELS, counted_mlp, model, penzai_mlp, uninitialized_mlp_v1
from tests.refusals import problem_paths, problems_of, refused

WIDE, TALL = (pzs.make_mesh({"data": n, "model": 8 // n}) for n in (4, 2))
RELAXED = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
RULES = {"embedding": "data", "embed": "data", "features": "data", "mlp": "model"}
LIBRARIES = ["counted mlp", "v1 mlp", "linen", "nnx", "haliax linear", "equinox", "plain"]
FIRST, BIASES = "mlp/Affine_0/**", "**/*.bias"
MLP = model("penzai mlp")


def variables(tree):
    kinds = (pz.Parameter, pz.ParameterValue, pz.StateVariable)
    return pz.select(tree).at_instances_of(kinds).get_sequence()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return pzs.save_params(tmp_path_factory.mktemp("saved") / "mlp", MLP)


# In memory


def test_with_params_differences():
    values = pzs.param_dict(MLP)
    first, second, *_ = values
    changed = {**values, second: pz.nx.ones({"other": 3}), "more": pz.nx.ones({"a": 2})}
    del changed[first]
    problems = refused(pzs.CheckpointMismatchError, pzs.with_params, MLP, changed)
    assert problems.keys() == {first, second, "more"}


@pytest.mark.parametrize("given", [jnp.ones(2), {}, len, {"w": NamedSharding(WIDE, P())}])
def test_param_dict_refuses_what_has_no_parameters(given):
    refused(pzs.RuleTypeError, pzs.param_dict, given)


@pytest.mark.parametrize(("name", "where"), [("equinox", "mlp"), ("penzai mlp", pzs.ROOT)])
def test_restore_params_into_an_edited_model(tmp_path, name, where):
    recipe = pzs.Recipe(pzs.wrap(where, pzs.Scoped, name="mlp"), pzs.wrap(where, pzs.Jitted))
    bare, other = (MODELS[name](seed) for seed in (0, 1))
    edited = recipe.apply(bare)
    assert pzs.param_dict(edited).keys() == pzs.param_dict(bare).keys()
    path = pzs.save_params(tmp_path / "edited", edited)
    restored = pzs.restore_params(path, other, WIDE, {}, **RELAXED)
    again = pzs.restore_params(path, recipe.apply(other), WIDE, {}, **RELAXED)
    assert params(restored) == params(again) == params(bare)
    state = pzs.TrainState.initial_state(edited, optax.sgd(0.1), jax.random.key(0))
    assert state.params.keys() == pzs.param_dict(bare).keys()
    assert flatten(state.model)[1] == flatten(edited)[1]


# Onto any mesh


@pytest.mark.parametrize("name", LIBRARIES)
def test_restore_params_of_every_library(tmp_path, name):
    path = pzs.save_params(tmp_path / "params", model(name))
    given = blank(model(name))
    before = [leaf.value for leaf in leaves_of(given)]
    restored = pzs.restore_params(path, given, WIDE, RULES, **RELAXED)
    assert params(restored) == params(model(name))
    trees.assert_lies(restored, WIDE, RULES, **RELAXED)
    assert all(a is leaf.value for a, leaf in zip(before, leaves_of(given), strict=True))
    assert params(pzs.with_params(given, restored)) == params(restored)


def test_restore_params_variables(tmp_path, saved):
    one = counted_mlp()
    frozen = pz.select(one).at_instances_of(pz.nn.Affine).pick_nth_selected(0)
    given = [frozen.apply(pz.freeze_params), one.count]
    restored = pzs.restore_params(saved, given, WIDE, {})
    assert restored[1] is restored[0].count is not one.count
    assert list(map(type, variables(restored))) == list(map(type, variables(given)))
    assert len(set(map(type, variables(restored)))) == 3
    # Nothing of the given model goes when the restored one is donated.
    jax.tree.map(lambda array: array.delete(), pz.freeze_variables(restored))
    assert int(one.count.value) == 0


@pytest.mark.parametrize("build", [penzai_mlp, uninitialized_mlp_v1])
def test_restore_params_abstract_model(tmp_path, build):
    source, like = model("v1 mlp"), build()
    if build is penzai_mlp:
        source, like = MLP, pzs.abstract_model(build)
    path = pzs.save_params(tmp_path / "params", source)
    restored = pzs.restore_params(path, like, TALL, RULES)
    assert params(restored) == params(source)
    assert all(isinstance(variable, pz.Parameter) for variable in variables(restored))


def test_restore_params_says_where_arrays_go_in_many_ways(saved):
    placed = pzs.place(blank(MLP), TALL, RULES)
    plan = pzs.make_plan(placed, TALL, RULES)
    ways = [
        (placed, {}),
        (plan.restore_structs(), {}),
        (MLP, {"plan": plan}),
        (MLP, {"mesh": plan}),
    ]
    for like, options in ways:
        restored = pzs.restore_params(saved, like, **options)
        assert params(restored) == params(MLP)
        trees.assert_lies(restored, TALL, RULES)
    explicit = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
    with jax.set_mesh(explicit):
        restored = pzs.restore_params(saved, MLP, explicit, RULES)
        assert params(restored) == params(MLP)
    trees.assert_lies(restored, explicit, RULES)
    abstract = pzs.make_mesh({"data": 8}, abstract=True)
    structs = pzs.make_plan(placed, abstract, {}).restore_structs()
    refused(pzs.MeshError, pzs.restore_params, saved, structs)


@pytest.mark.parametrize(
    "source", [*map(model, ["counted mlp", "nnx", "haliax linear"]), {"params": {"w": jnp.ones(2)}}]
)
def test_restore_params_of_a_train_state_and_of_a_whole_model(tmp_path, source):
    state = pzs.TrainState.initial_state(source, optax.adam(1e-3), jax.random.key(0))
    for tree in (state, source):
        path = pzs.save_train_state(tmp_path / type(tree).__name__, tree)
        assert params(pzs.restore_params(path, blank(source))) == params(source)


# Parts


@pytest.mark.parametrize(
    ("options", "count"), [({"only": FIRST}, 2), ({"except_": BIASES}, 2), ({"only": "**"}, 4)]
)
def test_save_params_and_restore_params_parts(tmp_path, options, count):
    ones = jax.tree.map(jnp.ones_like, pzs.param_dict(MLP))
    whole = pzs.save_params(tmp_path / "whole", ones)
    part = pzs.save_params(tmp_path / "part", ones, **options)
    # Of the whole a part is read, of the part all that is there.
    for path, chosen in ((whole, options), (part, {})):
        restored = pzs.restore_params(path, blank(MLP), others="keep", **chosen)
        assert sum(trees.numbers(x).all() for x in pzs.param_dict(restored).values()) == count
    moved = pzs.move(ones, blank(MLP), others="keep", **options)
    assert sum(trees.numbers(x).all() for x in pzs.param_dict(moved).values()) == count


def test_restore_params_into_a_train_state_is_told_to_take_its_model(saved):
    state = pzs.TrainState.initial_state(MLP, optax.sgd(0.1), jax.random.key(0))
    (problem,) = refused(pzs.CheckpointMismatchError, pzs.restore_params, saved, state).values()
    assert "restore_params(path, state.model)" in problem.fix
    assert params(pzs.restore_params(saved, state.model)) == params(MLP)


def test_restore_params_part_that_is_not_stored(tmp_path, saved):
    path = pzs.save_params(tmp_path / "part", MLP, except_=BIASES)
    for where, like, options in (
        (path, MLP, {"only": FIRST}),
        (saved, {"other": jnp.ones(2)}, {"allow": "extra"}),
        # Shapes have no values to keep.
        (saved, pzs.abstract_model(penzai_mlp), {"only": FIRST, "mesh": WIDE, "rules": RULES}),
    ):
        call = pzs.restore_params, where, like
        problems = problems_of(pzs.CheckpointMismatchError, *call, others="keep", **options)
        assert {problem.kind for problem in problems} == {"missing"}
    call = pzs.restore_params, saved, trees.structs_of(counted_mlp()), WIDE, RULES
    assert problem_paths(pzs.ShardingError, *call) == ["count"]


def test_restore_params_base_below_adapters(saved):
    selection = pz.select(blank(MLP))
    adapted = lora.loraify_linears_in_selection(selection, 2, jax.random.key(0))
    restored = pzs.restore_params(saved, adapted, WIDE, RULES, others="keep")
    assert params(restored) == params(adapted) | params(MLP)


def test_restore_params_refuses_options_that_fit_nothing(saved):
    problems = refused(pzs.CheckpointMismatchError, pzs.restore_params, saved, MLP, only=FIRST)
    assert "mlp/Affine_1/AddBias.bias" in problems
    call = pzs.restore_params, saved, MLP
    assert problem_paths(pzs.SelectionError, *call, except_="**/*") == [""]


@pytest.mark.parametrize(
    "options",
    [
        {"others": "kept", "allow": "transposed", "only": 3, "rename_axes": {"features": 3}},
        {"allow": 3, "except_": ["a", None], "names": [("w", "x")], "verify": "no"},
    ],
)
def test_restore_params_names_all_options_that_cannot_be_read(saved, options):
    problems = refused(pzs.RuleTypeError, pzs.restore_params, saved, MLP, **options)
    assert problems.keys() == {*options}


@pytest.mark.parametrize("name", ["params", "train_state"])
def test_swapped_arguments_are_told_their_order(saved, name):
    for called in (f"save_{name}", f"restore_{name}"):
        (problem,) = refused(pzs.RuleTypeError, getattr(pzs, called), MLP, saved).values()
        assert f"{called}(path, tree)" in problem.fix
