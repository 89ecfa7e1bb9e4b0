"""What a layout makes of a model and a mesh: rules, plans, recipes, and errors."""

import ast
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.layouts.layout import Layout
from penzai_shard.rules import Rule
from tests.layouts.transformers import build_llama, loss_fn
from tests.models import mlp_v1
from tests.refusals import problem_paths, problems_of

EIGHT = pzs.make_mesh({"data": 8})
TWO = pzs.make_mesh({"data": 4, "model": 2})
DEFAULTS = {"loss_fn": loss_fn, "optimizer": optax.adamw(1e-3), "rng": jax.random.key(0)}


def shapes(**options):
    return pzs.abstract_model(build_llama, **options)


def specs(plan):
    return {leaf.path.removeprefix("transformer/"): leaf.spec for leaf in plan.leaves}


@pz.pytree_dataclass
class Block(pz.nn.Layer):
    """A block with names of its own."""

    up: pz.nn.Linear
    down: pz.nn.Linear

    def __call__(self, x, /, **side_inputs):
        return x + self.down(self.up(x))


def build_blocks():
    def build(name, inputs, outputs):
        return pz.nn.Linear.from_config(name, jax.random.key(0), inputs, outputs)

    widths = {"embed": 8}, {"mlp": 16}
    blocks = [Block(build(f"up{i}", *widths), build(f"down{i}", *widths[::-1])) for i in range(2)]
    return pz.nn.Sequential(blocks)


# Roles


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ({"heads": 4}, "heads"),
        ({"heads": 2, "multiplier": 3}, "head_groups"),
        ({"heads": 3, "multiplier": 4}, "query_heads"),
        ({"heads": 1, "multiplier": 4}, "query_heads"),
    ],
)
def test_for_model_splits_the_heads_that_divide(sizes, split):
    rules = Layout.tensor_parallel().for_model(shapes(**sizes), TWO).parameters.rules
    over = {rule.logical_axis: rule.mesh_axes for rule in rules if "head" in rule.logical_axis}
    assert over.pop(split) == ("model",)
    assert not any(over.values())


def test_for_model_splits_inferred_products_of_an_axis_along_their_first_factor():
    names = {
        "q": ("embedding", "head_groups*query_heads*projection"),
        "k": ("embedding", "head_groups*projection"),
        "up": ("embedding", "gate_up*neurons"),
        "down": ("neurons", "embedding"),
    }
    widths = {"embedding": 4, "neurons": 8, "gate_up*neurons": 16}
    model = {
        path: jax.ShapeDtypeStruct([widths.get(axis, 16) for axis in axes], "float32")
        for path, axes in names.items()
    }
    plan = Layout.tensor_parallel().plan(pzs.name_axes(model, names), TWO)
    assert {path for path, spec in specs(plan).items() if "model" in spec} == {"q", "k", "down"}


@pytest.mark.parametrize("size", [32, 33])
def test_vocabulary_is_split_where_it_divides_and_the_plan_says_so(size):
    plan = Layout.two_dimensional(min_size=1).plan(shapes(vocabulary=size), TWO)
    over = jax.tree.leaves(tuple(specs(plan)["lm_head.weights"]))
    assert ("model" in over) == (size == 32)
    assert len(plan.remarks) == 1
    assert "'vocabulary'" in plan.remarks[0]


def test_vocabulary_as_one_says():
    model = shapes()
    assert Layout.tensor_parallel(vocabulary=None).plan(model, TWO).remarks == ()
    layout = Layout.fully_sharded(min_size=1, vocabulary="model")
    spec = specs(layout.plan(model, TWO))["embedder.embeddings"]
    assert tuple(spec) == ("model", "data")
    with pytest.raises(pzs.PlanError):
        layout.plan(shapes(vocabulary=33), TWO)


def test_names_say_what_a_model_calls_its_axes():
    names = {"neurons": "mlp", "heads": None, "batch": "examples"}
    layout = Layout.two_dimensional(min_size=1, names=names)
    plan = layout.plan(build_blocks(), TWO)
    assert tuple(specs(plan)["up0.weights"]) == ("data", "model")
    batch = layout.shard_batch({"x": pz.nx.ones({"examples": 8, "embed": 8})}, TWO)
    assert tuple(batch["x"].data_array.sharding.spec) == ("data",)


def test_a_role_that_stays_whole_does_under_the_names_of_a_model():
    def specs(axis, **options):
        rules = [Rule(axis, ()), Rule(None, ("data",))]
        plan = Layout(parameters=rules, compute={}, **options).plan(build_blocks(), EIGHT)
        return {leaf.path: leaf.spec for leaf in plan.leaves}

    assert specs("neurons", names={"neurons": "mlp"}) == specs("mlp") != specs("other")


def test_experts_come_before_their_neurons():
    expert = {"w": pz.nx.ones({"experts": 4, "embedding": 8, "neurons": 16})}
    for axis, expected in (("expert", ("expert", None, "model")), ("model", ("model",))):
        mesh = pzs.make_mesh({"data": 2, "expert": 2, "model": 2})
        layout = Layout.tensor_parallel(experts=axis, names={"heads": None})
        assert tuple(specs(layout.plan(expert, mesh))["w"]) == expected


@pytest.mark.parametrize(
    ("options", "role"),
    [
        ({}, "neurons"),
        ({"names": {"neurons": "mpl", "heads": None}}, "neurons"),
        ({"names": {"neurons": "mlp", "heads": None}, "experts": "model"}, "experts"),
        ({"names": {"neurons": "mlp", "heads": None}, "vocabulary": "model"}, "vocabulary"),
    ],
)
def test_for_model_refuses_what_the_model_does_not_name(options, role):
    for_model = Layout.tensor_parallel(**options).for_model
    problem = problems_of(pzs.ShardingError, for_model, build_blocks(), TWO)[0]
    assert (problem.path, "names={" in problem.fix) == (role, True)


# Plans


@pytest.mark.parametrize("devices", [8, 256])
@pytest.mark.parametrize("preset", [Layout.zero1, Layout.fully_sharded])
def test_bytes_per_device_are_within_two_percent_of_the_ideal(preset, devices):
    # 1.5 billion parameters in float32, with two moments each.
    sizes = {"embedding": 2048, "heads": 16, "projection": 128, "neurons": 5632, "blocks": 27}
    build = functools.partial(build_llama, vocabulary=32_000, stacked=True, **sizes)
    mesh = pzs.make_mesh({"data": devices}, abstract=True)
    layout = preset()
    state, _ = layout.build(build, mesh=mesh, **DEFAULTS)
    plan = layout.plan(state, mesh)
    parameters = sum(leaf.total_bytes for leaf in plan.leaves if leaf.path.startswith("params/"))
    assert parameters > 4 * 1.5e9
    whole = parameters if layout.optimizer else parameters / devices
    assert plan.bytes_per_device <= 1.02 * (whole + 2 * parameters / devices)


def test_statistics_without_names_are_split_where_their_parameters_are_whole():
    build = lambda: {"w": jnp.ones((8, 8))}  # noqa: E731
    layout = Layout.zero1(min_size=1, unnamed="largest", blocks=())
    state, _ = layout.build(build, mesh=EIGHT, on_unnamed="replicate", **DEFAULTS)
    assert state.trained_arrays["w"].sharding.spec == jax.P()
    assert state.opt_arrays[0].mu["w"].sharding.spec == jax.P("data")
    with pytest.raises(pzs.PlanError):
        layout.plan(build(), EIGHT)


def test_arrays_that_the_mesh_does_not_divide_are_split_by_several_mesh_axes():
    # As in GPT-2 XL: 1,600 and 25 do not divide over 256 devices.
    model = {"w": pz.nx.wrap(jnp.zeros((1600, 25)), "embedding", "heads")}
    mesh = pzs.make_mesh({"data": 256}, abstract=True)
    with pytest.warns(pzs.ShardingWarning, match=r"\('data', 'more'\)"):
        plan = Layout.fully_sharded(min_size=1, blocks=()).plan(model, mesh)
    assert len(plan.remarks) == 1
    mesh = pzs.make_mesh({"data": 64, "more": 4}, abstract=True)
    model = {"w": pz.nx.wrap(jnp.zeros((1600, 20)), "embedding", "heads")}
    plan = Layout.fully_sharded(("data", "more"), min_size=1).plan(model, mesh)
    assert tuple(specs(plan)["w"]) == ("data", "more")


# Recipes


@pytest.mark.parametrize("layout", [Layout.two_dimensional(min_size=1), Layout.sequence_parallel()])
def test_recipe_comes_off_and_survives_json(layout):
    model = build_llama()
    recipe = layout.recipe(model, TWO)
    assert jax.tree.structure(pzs.strip(recipe.apply(model))) == jax.tree.structure(model)
    assert pzs.Recipe.from_json(recipe.to_json(), mesh=TWO) == recipe


def test_blocks_say_where_the_layers_are():
    names = {"neurons": "mlp", "heads": None}
    x = pz.nx.ones({"batch": 8, "embed": 8})
    expected = build_blocks()(x).unwrap("batch", "embed")
    for blocks in (Block, "**/block", ()):
        layout = Layout.two_dimensional(min_size=1, names=names, blocks=blocks)
        model = layout.recipe(build_blocks(), TWO).apply(build_blocks())
        assert jnp.allclose(model(x).unwrap("batch", "embed"), expected, rtol=1e-5)
    recipe = Layout.two_dimensional(names=names, blocks="sublayers/0").recipe
    paths = problem_paths(pzs.ShardingError, recipe, build_blocks(), TWO)
    assert paths == ["up1.weights", "down1.weights"]


@pytest.mark.parametrize(
    "layout", [Layout.fully_sharded(min_size=1), Layout.two_dimensional(min_size=1)]
)
def test_a_sequence_of_other_layers_is_gathered_layer_by_layer(layout):
    layout = dataclasses.replace(layout, names={"neurons": "mlp", "heads": None})
    model, x = build_blocks(), pz.nx.ones({"batch": 8, "embed": 8})
    recipe = layout.recipe(model, TWO)
    # What the blocks are is there to be read.
    assert "wrap(Block, ConstrainActivations(GatherParameters(...))" in str(recipe)
    edited = recipe.apply(model)
    for kind in (pzs.ConstrainActivations, pzs.GatherParameters, Block):
        assert pz.select(edited).at_instances_of(kind).count() == 2
    expected = model(x).unwrap("batch", "embed")
    assert jnp.allclose(edited(x).unwrap("batch", "embed"), expected, rtol=1e-5)
    assert pzs.Recipe.from_json(recipe.to_json(), mesh=TWO, allow=[__name__.partition(".")[0]])


def edits_and_gathers(layout, model, mesh):
    """Whether a layout edits a model, and whether it gathers in front of the loss."""
    return bool(layout.recipe(model, mesh).edits), layout.gathering(model, mesh) is not None


def test_a_model_of_unknown_parts_is_gathered_in_front_of_the_loss():
    # No sequence, and of no type that a layout knows.
    model, layout = pz.nn.Residual(build_blocks()), Layout.fully_sharded(min_size=1)
    assert edits_and_gathers(layout, model, EIGHT) == (False, True)
    layout = Layout.fully_sharded(min_size=1, blocks=Block)
    assert edits_and_gathers(layout, model, EIGHT) == (True, False)


def test_a_model_is_laid_out_once():
    for first in (Layout.fully_sharded(min_size=1), Layout.sequence_parallel()):
        edited = first.recipe(shapes(), TWO).apply(shapes())
        problems = problems_of(pzs.RuleTypeError, Layout.two_dimensional().recipe, edited, TWO)
        assert "strip(model)" in problems[0].fix
    assert Layout.two_dimensional().recipe(pzs.strip(edited), TWO).edits


def test_names_that_a_model_lacks_are_refused_at_once_with_one_fix():
    model = build_blocks()
    problems = problems_of(pzs.RuleTypeError, Layout.two_dimensional().recipe, model, TWO)
    assert [problem.path for problem in problems] == ["neurons", "heads"]
    (fix,) = {problem.fix for problem in problems}
    names = ast.literal_eval(re.search(r"names=(\{.*?\})", fix)[1])
    assert Layout.two_dimensional(names=names, min_size=1).recipe(model, TWO).edits


def test_a_model_whose_layers_reduce_where_the_compiler_decides_warns():
    weights = {"w": pz.nx.ones({"embedding": 8, "neurons": 8})}
    names = {"heads": None}
    with pytest.warns(pzs.ShardingWarning, match="blocks=()"):
        assert not Layout.two_dimensional(min_size=1, names=names).recipe(weights, TWO).edits
    layout = Layout.two_dimensional(min_size=1, names=names, blocks=())
    assert edits_and_gathers(layout, weights, TWO) == (False, True)
    # Blocks are layers of Penzai: the fix is not to name others.
    layout = Layout.two_dimensional(min_size=1, names=names, blocks=dict)
    (problem,) = problems_of(pzs.RuleTypeError, layout.recipe, weights, TWO)
    assert (problem.path, problem.fix) == ("blocks", "Write blocks=().")
    # There is one way to sum gradients, and nothing to gather.
    layout = Layout.data_parallel()
    assert edits_and_gathers(layout, weights, EIGHT) == (False, False)
    layout = Layout.fully_sharded(manual=True, rematerialise="dots", precision="bfloat16")
    paths = problem_paths(pzs.ShardingError, layout.recipe, weights, EIGHT)
    assert paths == ["rematerialise", "manual", "precision"]


def test_a_model_of_the_first_api_warns_where_all_of_it_stays_whole():
    with pytest.warns(pzs.ShardingWarning, match="blocks=()"):
        assert not Layout.fully_sharded().recipe(mlp_v1(), EIGHT).edits
    # There is one way to sum gradients, and nothing to gather.
    assert not Layout.data_parallel().recipe(mlp_v1(), EIGHT).edits


# Building


def test_auto_is_the_preset_that_the_mesh_names():
    assert Layout.auto(EIGHT) == Layout.fully_sharded()
    assert Layout.auto(TWO) == Layout.two_dimensional()
    assert Layout.auto({"replica": 2, "data": 4}) == Layout.hybrid()
    assert Layout.auto({"model": 8}).parameters == Layout.tensor_parallel().parameters
    with pytest.raises(pzs.MeshError):
        Layout.auto({"x": 8})


def test_build_on_an_abstract_mesh_prices_what_is_not_there():
    mesh = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
    state, step = Layout.two_dimensional(min_size=1).build(build_llama, mesh=mesh, **DEFAULTS)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    tokens = jax.ShapeDtypeStruct((8, 9), "int32")
    tokens = Layout.two_dimensional().shard_batch(tokens, mesh, first_axis="batch")
    assert step.lowerable(state, tokens=tokens).leaves
    assert step.step_metrics == ("loss",)


ZERO1, TOKENS = Layout.zero1(), {"x": jnp.ones((8, 2))}


@pytest.mark.parametrize("sizes", [{"data": 4, "model": 2}, {"data": 8}, {"x": 8}])
def test_a_mesh_without_an_axis_of_the_preset_is_answered_with_one_that_has_it(sizes):
    weights = {"w": pz.nx.ones({"embedding": 16, "neurons": 8})}
    mesh = pzs.make_mesh(sizes)
    (problem,) = problems_of(pzs.MeshError, Layout.hybrid().plan, weights, mesh)[:1]
    (text,) = re.findall(r"make_mesh\((.*)\)", problem.fix)
    other = pzs.make_mesh(ast.literal_eval(text))
    assert other.size == mesh.size
    assert other.axis_names == ("replica", "data")
    assert Layout.hybrid().plan(weights, other).mesh == other


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: Layout.zero1(rematerialize="dots"), "rematerialise"),
        (lambda: Layout.zero1(rematerialise="dot"), "rematerialise='dots'"),
        (lambda: Layout.fully_sharded(None), "'data'"),
        (lambda: Layout.sequence_parallel("data", None), "'data'"),
        (lambda: Layout.zero1(names={"neuron": "mlp"}), "neurons"),
        (lambda: Layout.zero1(names="mlp"), "neurons"),
        (lambda: Layout.tensor_parallel(min_size=3), "vocabulary"),
        (lambda: Layout.auto(None), "make_mesh"),
        (lambda: Layout.fully_sharded(vocabulary="data"), "different"),
        (lambda: Layout.tensor_parallel(manual=True), "manual=False"),
        (lambda: ZERO1.build(build_llama(), mesh=EIGHT, **DEFAULTS), "build"),
        (lambda: ZERO1.shard_batch(TOKENS, EIGHT), "first_axis"),
        (lambda: Layout.two_dimensional().build(build_llama, mesh=EIGHT, **DEFAULTS), "data"),
    ],
)
def test_mistakes_are_refused_with_what_to_write(call, fix):
    assert fix in problems_of((pzs.RuleTypeError, pzs.MeshError), call)[0].fix
