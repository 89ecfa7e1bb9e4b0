"""What ``why`` says of steps: each array's layout, and where it comes from."""

import collections
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    ConstrainShardingByName,
    Recipe,
    TrainState,
    WhyReport,
    abstract_model,
    build_train_step_fn,
    data_parallel,
    fully_sharded,
    insert_after,
    make_mesh,
    make_plan,
    tensor_parallel,
    train_state_sharding,
    why,
)
from penzai_shard.errors import RuleTypeError, SelectionError
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from tests.small_train_steps import build_mlp, squares

P = PartitionSpec
MESH = make_mesh({"data": 4, "model": 2}, abstract=True)
BLOCKS = data_parallel() | tensor_parallel() | fully_sharded(min_size=64)


def struct(*shape, spec, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def named(spec, **sizes):
    return pz.nx.NamedArray(collections.OrderedDict(sizes), struct(*sizes.values(), spec=spec))


def lowered_train_step(rules, *, build=build_mlp, loss=squares, inputs=None, edit=None, **options):
    """A train step on abstract arrays, as it is lowered."""
    model = make_plan(abstract_model(build), MESH, rules, on_unnamed="replicate").restore_structs()
    state = TrainState.initial_state(
        model if edit is None else edit(model), optax.adam(1e-3), jax.random.key(0)
    )
    shardings = train_state_sharding(state, MESH, rules)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    step = build_train_step_fn(loss, **options)
    inputs = {"x": named(P("data"), batch=16, embedding=16)} if inputs is None else inputs
    return lower_step(step, (state,), inputs)


@pytest.fixture(scope="module")
def mlp_step() -> LoweredStep:
    constraint = ConstrainShardingByName(MESH, {"batch": "data"})
    edit = Recipe(insert_after(pz.nn.Elementwise, constraint))
    return lowered_train_step(BLOCKS, edit=edit.apply)


@pytest.fixture(scope="module")
def mlp_report(mlp_step) -> WhyReport:
    return why(mlp_step)


def row_of(report, label, kind="output"):
    found = [row for row in report.rows if (row.label, row.kind) == (label, kind)]
    assert len(found) == 1, [row.what for row in report.rows]
    return found[0]


def causes_of(row):
    return {cause.mesh_axis: (cause.kind, cause.path) for cause in row.causes}


def test_outputs_and_gradients_have_their_layouts_and_causes(mlp_report: WhyReport) -> None:
    up = row_of(mlp_report, "block_0/up")
    assert (up.names, up.spec) == (("batch", "neurons"), (("data",), ("model",)))
    assert causes_of(up)["model"] == ("parameter", "params/block_0/up.weights")
    gradient = row_of(mlp_report, "block_1/down.weights", "gradient")
    assert (gradient.names, gradient.spec) == (("neurons", "embedding"), (("model",), ("data",)))
    assert set(causes_of(gradient).values()) == {("parameter", "params/block_1/down.weights")}
    assert not mlp_report.unexplained


def test_constraint_layer_is_named_with_its_rule() -> None:
    inner = pz.nn.Sequential([ConstrainShardingByName(MESH, {"batch": "data"})])
    linear = pz.nn.Linear.from_config("l", jax.random.key(0), {"a": 8}, {"b": 8})
    model = pz.nn.Sequential([linear, inner])
    (cause,) = row_of(why(model, named(P(), batch=8, a=8)), "l").causes
    assert (cause.kind, cause.rule) == ("constraint layer", "'batch' -> 'data'")
    assert cause.path == "l/sequential/constrain_sharding_by_name"
    assert "ConstrainShardingByName): its rule 'batch' -> 'data'" in str(cause)


def test_layers_in_others_of_the_same_name_are_told_apart() -> None:
    def linear(name: str, old: str, new: str) -> pz.nn.Linear:
        return pz.nn.Linear.from_config(name, jax.random.key(0), {old: 8}, {new: 8})

    inner = pz.nn.Sequential([linear("b/up", "a", "h"), linear("b/more", "h", "g")])
    block = pz.nn.Sequential([inner, linear("b/down", "g", "a")])
    model = pz.nn.Sequential([block, linear("head", "a", "c")])
    report = why(model, named(P("data"), batch=8, a=8))
    paths = {row.label: row.path for row in report.of_kind("output")}
    assert len(paths) == len(report.of_kind("output"))
    assert (paths["b"], paths["b/sublayers/0"]) == ("sublayers/0", "sublayers/0/sublayers/0")
    told = str(report.narrowed("b"))
    assert "Output of b [" in told
    assert "Output of b/sublayers/0" not in told


def test_constraint_layers_that_are_called_the_same_are_told_by_the_layer_before_them() -> None:
    def linear(name: str, old: str, new: str) -> pz.nn.Linear:
        return pz.nn.Linear.from_config(name, jax.random.key(0), {old: 8}, {new: 8})

    layers = [linear("m/up", "a", "b"), linear("m/down", "b", "c"), pz.nn.Elementwise(jnp.tanh)]
    model = pz.nn.Sequential(layers)
    constraint = ConstrainShardingByName(MESH, {"batch": "data"})
    model = Recipe(insert_after(pz.nn.Linear, constraint)).apply(model)
    causes = [
        row.causes[0]
        for row in why(model, named(P(), batch=8, a=8)).rows
        if row.label == "m/constrain_sharding_by_name"
    ]
    assert [cause.path for cause in causes] == [
        "m/constrain_sharding_by_name after m/up",
        "m/constrain_sharding_by_name after m/down",
    ]


def test_unpinned_results_follow_and_declared_ones_say_so() -> None:
    x, w = struct(8, 8, spec=P("data")), struct(8, 8, spec=P(None, "model"))
    declared = NamedSharding(MESH, P(("data", "model")))
    step = jax.jit(lambda x, w: {"y": x @ w, "z": x + 1}, out_shardings={"y": None, "z": declared})
    report = why(step, x, w)
    assert causes_of(row_of(report, "result/y", "result")) == {
        "data": ("input", "x"),
        "model": ("input", "w"),
    }
    z = row_of(report, "result/z", "result")
    assert z.spec == (("data", "model"), ())
    assert causes_of(z)["model"] == ("declared result", "result/z")


def test_without_a_mesh_it_is_said_what_gives_one() -> None:
    report = why(jax.jit(jnp.tanh), jax.ShapeDtypeStruct((8,), jnp.float32))
    assert report.mesh_shape == {}
    assert "place(model, mesh, rules)" in report.notes[-1]
    placed = why(jax.jit(jnp.tanh), struct(8, spec=P("data")))
    assert placed.notes == ()


def test_lowered_step_is_taken_without_arguments_alone(mlp_step: LoweredStep) -> None:
    with pytest.raises(RuleTypeError, match="lowered already"):
        why(mlp_step, 1)


def test_at_narrows_and_says_the_whole_way(mlp_report: WhyReport) -> None:
    narrowed = mlp_report.narrowed("block_0/down")
    assert {row.what for row in narrowed.rows} == {
        "output of block_0/down",
        "gradient of block_0/down.weights",
    }
    assert "came through a matrix product in block_0/down" in str(narrowed)
    assert {row.label for row in mlp_report.narrowed("**/up").rows} > {"block_1/up"}
    assert mlp_report.narrowed("up").rows == mlp_report.narrowed("**/up").rows
    assert mlp_report.narrowed("params/block_0/up.weights").rows[0].kind == "gradient"
    with pytest.raises(SelectionError, match="Did you mean 'block_0/down'"):
        mlp_report.narrowed("block_0/donw")
    with pytest.raises(SelectionError, match=r"Did you mean 'up\.weights'"):
        mlp_report.narrowed("up.wieghts")


@pytest.mark.parametrize("at", ["blocks/1/up", "block/1/up", "params/blocks/1", "blocks/*/up"])
def test_numbered_blocks_are_found_by_number(mlp_report: WhyReport, at: str) -> None:
    named = at.replace("blocks/", "block_").replace("block/", "block_")
    assert mlp_report.narrowed(at).rows == mlp_report.narrowed(named).rows
    with pytest.raises(SelectionError, match="no layer, parameter or result of this name"):
        mlp_report.narrowed(at.replace("block", "stage"))


def test_equal_blocks_are_one_row_and_all_is_in_the_json(mlp_report: WhyReport) -> None:
    folded = [row for row in mlp_report.table().rows if row[0] == "output of block_*/up"]
    assert [row[1:3] for row in folded] == [("2", "batch=16/data, neurons=32/model")]
    data = json.loads(mlp_report.to_json())
    assert len(data["rows"]) == len(mlp_report.rows)
    assert data["rows"][0]["causes"][0]["mesh_axis"] == "data"
    assert len(mlp_report.sentences) < len(mlp_report.rows)


def test_table_is_readable_in_80_columns(mlp_report: WhyReport) -> None:
    text = mlp_report.table().plain_text(80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("on mesh (data=4, model=2): ")
