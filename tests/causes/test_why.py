"""What ``why`` says of steps: causes, which are taken away in turn, losses, rows and names."""

import collections
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.causes.ways import Ways
from penzai_shard.causes.why import why
from penzai_shard.jax_internals import compiler
from penzai_shard.propagation.flat import propagate_lowered
from tests.propagation.programs import MESH, SHARD_MAPS, array, lower_shard_map


@pz.pytree_dataclass
class OfData(pz.nn.Layer):
    """A layer of a user, which does something with the data of a named array."""

    function: Callable[..., Any] = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, /, **side_inputs):
        return dataclasses.replace(value, data_array=self.function(value.data_array))


def on(*spec):
    return NamedSharding(MESH, P(*spec))


def small(*spec):
    return array(*spec, shape=(8, 8))


def named(*spec, data=None, **sizes):
    sizes = sizes or {"batch": 8, "a": 8}
    shape = tuple(sizes.values())
    return pz.nx.NamedArray(collections.OrderedDict(sizes), data or array(*spec, shape=shape))


def planned(model, rules):
    return pzs.make_plan(model, MESH, rules, on_unnamed="replicate").restore_structs()


def linear(rules=(), name="up", inputs="a", outputs="b"):
    made = pz.nn.Linear.from_config(name, jax.random.key(0), {inputs: 8}, {outputs: 8})
    return made if rules is None else planned(made, dict(rules))


def behind(*layers, rules=()):
    return pz.nn.Sequential([linear(rules), *layers]), (named(),)


def by_name(rules):
    return pzs.ConstrainShardingByName(MESH, rules)


def train(model, rules=(), optimizer_rules=None, spec=(), **options):
    """A train step of a model that takes the axis a, with its arguments."""

    def loss(*, model, rng, state, x):
        return jnp.mean(model(x).unwrap("batch", "b") ** 2), state, {}

    def lay(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    model = planned(model, dict(rules))
    state = pzs.TrainState.initial_state(model, optax.adam(0.1), jax.random.key(0))
    shardings = pzs.train_state_sharding(state, MESH, dict(rules), optimizer_rules)
    state = jax.tree.map(lay, state, shardings)
    return pzs.build_train_step_fn(loss, **options), (state,), {"x": named(*spec)}


def roll(axis):
    def block(init_base_rng):
        return pz.nn.Sequential([linear(None), linear(None, "down", "b", "a")])

    stack = pz.nn.LayerStack.from_sublayer_builder(block, "n", 3, None, {})
    return planned(pzs.roll_layer_stacks().apply(stack), {"b": axis}), (named(),)


def gathered(axis):
    return pzs.GatherParameters(linear(), MESH, {"b": axis}), (named(),)


def moments(axis):
    return train(linear(), optimizer_rules={"a": axis})


def region(axis):
    spec = P(axis)
    inner = jax.shard_map(jnp.tanh, mesh=MESH, in_specs=P(), out_specs=spec, check_vma=False)
    return jax.jit(lambda x: inner(x) + 1), (small(),)


def of_user(axis):
    return behind(OfData(lambda y: jax.lax.with_sharding_constraint(y, on(axis))))


def of_flax(axis):
    return behind(OfData(lambda y: nn.with_logical_constraint(y, ("b",), [("b", axis)], MESH)))


def declared(axis):
    return jax.jit(lambda x, w: x @ w, out_shardings=on(axis)), (small(), small())


def line(function, number):
    return f"test_why.py:{function.__code__.co_firstlineno + number}"


TANH = pz.nn.Elementwise(jnp.tanh)
BY_NAME = "constraint layer, up/constrain_sharding_by_name"
WEIGHTS, TRAINED = "parameter, model/up.weights", "parameter, params/up.weights"
GRADIENT = "gradient params/up.weights"
# A step for a mesh axis or None, and the row that is asked about; kind, path and logical axis of
# the cause of the mesh axis.
CAUSES = {
    "input": (lambda a: (linear(), (named(a),)), "output up", "input, argument, batch"),
    "by name": (lambda a: behind(by_name({"batch": a})), "output up", f"{BY_NAME}, batch"),
    "parameter": (lambda a: behind(TANH, rules={"b": a}), "output up/elementwise", f"{WEIGHTS}, b"),
    "gathered": (gathered, "output up", "constraint layer, up, b"),
    "moments": (moments, GRADIENT, "train step, params/up.weights, a"),
    "declared": (declared, "result result", "declared result, result, None"),
    "batch": (lambda a: train(linear(), spec=(a,)), "output up", "input, inputs/x, batch"),
    "gradient": (lambda a: train(linear(), {"a": a}), GRADIENT, f"{TRAINED}, a"),
    "rolled stack": (roll, "output up", f"{WEIGHTS}, b"),
    "shard_map": (region, "result result", f"shard_map, {line(region, 3)}, None"),
    "flax": (of_flax, "output up/of_data", f"constraint, {line(of_flax, 1)}, None"),
    "user": (of_user, "output up/of_data", f"constraint, {line(of_user, 1)}, None"),
}


def ask(step, args, kwargs=None, **options):
    return why(step, *args, **(kwargs or {}), **options)


def find_row(report, name):
    (row,) = [row for row in report.rows if f"{row.kind} {row.path}" == name]
    return row


@pytest.mark.parametrize("name", CAUSES)
def test_cause_is_named_and_without_it_the_layout_goes(name):
    build, row, expected = CAUSES[name]
    (cause,) = find_row(ask(*build("data")), row).causes
    assert f"{cause.kind}, {cause.path}, {cause.logical_axis}" == expected
    assert cause.mesh_axis == "data"
    assert cause.rule == (f"{cause.logical_axis!r} -> 'data'" if cause.logical_axis else "")
    assert find_row(ask(*build(None)), row).spec == P()


def test_parameter_without_a_layout_gets_that_of_its_use():
    free = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), planned(linear(None), {}))
    report = why(pz.nn.Sequential([free, by_name({"b": "model"})]), named("data"))
    (cause,) = find_row(report, "parameter model/up.weights").causes
    assert (cause.kind, cause.logical_axis) == ("constraint layer", "b")


# Losses


def losses_of(report, row):
    return [f"{x.reason} {x.cause.mesh_axis} {x.place}" for x in find_row(report, row).losses]


def text_of(report):
    return " ".join(str(report).split())


def join(y):
    """Batch is joined to another axis and cut again: behind it the mesh axis is there again."""
    return jnp.tanh(y.T.reshape(-1)).reshape(y.T.shape).T


MISTAKES = {
    "reshape": (OfData(join), "'data' of input x (batch) is lost at reshape: 'batch' (8) is cut"),
    "constraint": (by_name({"b": "model"}), "(batch) is lost at a constraint: another layout of"),
    "vocabulary": (by_name({"batch": "data", "b": None}), "(b) is lost at a constraint: another"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_in_the_first_lines(name):
    """Once, though the backward pass repeats it, and the mesh axis is there again behind it."""
    layer, expected = MISTAKES[name]
    stem = linear(None, "block_0/up"), linear(None, "block_0/down", "b", "a")
    layers = [*stem, linear(None, "block_1/up"), layer, by_name({"batch": "data", "b": "model"})]
    report = ask(*train(pz.nn.Sequential([*layers, TANH]), {"b": "model"}, spec=("data",)))
    assert expected in " ".join(" ".join(str(report).splitlines()[:10]).split())
    assert len(report.losses) == 1


def test_operation_and_layer_of_a_loss_are_named():
    cut = OfData(lambda y: y.reshape(3, 4, 8).transpose(1, 0, 2).reshape(12, 8))
    report = why(behind(cut, TANH)[0], named("data", batch=12, a=8))
    assert losses_of(report, "output up/elementwise")[:1] == ["cut data reshape in up/of_data"]
    # Three other devices have as many of the 12 x 8 floats each.
    assert report.losses[0].bytes == 3 * 12 * 8 * 4 // 4
    what = "'batch' (12) is cut or joined there, and the parts do not fit"
    assert f"'data' of input argument (batch) is lost at reshape: {what}" in text_of(report)


def test_constraint_that_loses_and_rivals_are_named():
    report = why(behind(by_name({"batch": None}))[0], named("data"))
    place = "a constraint in up/constrain_sharding_by_name"
    assert losses_of(report, "output up") == [f"pinned data {place}"]
    (loss,) = why(lambda x, y: x * y, small("data"), small(None, "data")).losses
    assert (loss.reason, loss.place) == ("used", "mul")
    assert "'data' of input x splits another dimension there" in loss.text
    report = why(lambda x, y: (x[:5], y[:6]), small("model"), small("data"))
    assert {loss.place for loss in report.losses} == {"the end of the step"}
    # Of y more is gathered.
    assert [(x.reason, x.cause.path) for x in report.losses] == [("uneven", "y"), ("uneven", "x")]


def test_parameter_that_is_gathered_for_use_is_no_loss():
    layers = linear({"b": "data"}, "m/up"), linear((), "m/down", "b", "c")
    report = why(pz.nn.Sequential(layers), named("data"))
    assert report.losses == report.lost == ()
    text = "m/up: model/m/up.weights is gathered over 'data' for a matrix product"
    assert text in [str(loss) for row in report.collectives().rows for loss in row.because]


# Rows


@pytest.fixture(scope="module")
def blocks():
    ends = [("up", "a", "b"), ("down", "b", "a")]
    layers = [linear(None, f"block_{i}/{name}", *axes) for i in range(2) for name, *axes in ends]
    step = train(pz.nn.Sequential([*layers, linear(None, "head")]), {"b": "model"}, spec=("data",))
    return step, ask(*step)


def test_what_one_expects_has_no_row_in_the_table_and_equal_blocks_one(blocks):
    report = blocks[1]
    counts = [len(report.of_kind(kind)) for kind in ("output", "gradient", "parameter")]
    data = json.loads(report.to_json())
    assert (counts, len(data["rows"]), len(data["arrays"])) == ([6, 5, 5], 5, 16)
    lines = str(report).splitlines()
    assert [line for line in lines if line.startswith("block_{0-1}/up")]
    assert sum("block_{0-1}/" in line and "batch=8/data" in line for line in lines) == 2


def test_at_narrows_to_a_layer_and_what_is_in_it(blocks):
    step, report = blocks
    for at in ("block_1/up", "block_1/*", "**/block_1/up"):
        found = {row.path for row in ask(*step, at=at).rows}
        assert {"block_1/up", "params/block_1/up.weights"} <= found
        assert found < {row.path for row in report.rows}
    assert "model from its parameter weights (b)" in text_of(ask(*step, at="block_1/up"))
    misspelt = {"block_1/pu": "block_1/up", "had.weights": "head.weights", "dowm": "down"}
    for at, near in misspelt.items():
        with pytest.raises(pzs.SelectionError) as caught:
            ask(*step, at=at)
        assert f"at={near!r}" in caught.value.problems[0].fix
    with pytest.raises(pzs.RuleTypeError):
        ask(*step, at=3)


def test_step_without_a_mesh_says_so():
    assert "no argument lies over a mesh" in str(why(lambda x: x + 1, jnp.ones(8)))


def test_shard_maps_are_answered_and_nothing_is_compiled(monkeypatch):
    events = []
    monkeypatch.setattr(compiler, "compile_bytecode", None)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    for name in SHARD_MAPS:
        ways = Ways(propagate_lowered(lower_shard_map(name)))
        for value in ways.makers.keys() | ways.users.keys():
            axes = [axis for axes in ways.values[value].spec or () for axis in axes]
            assert all(ways.cause(value, axis).kind != "unknown" for axis in axes), name
            ways.lost(value)
    assert why(jax.jit(lambda x: (x @ x).sum(0)), array("data")).rows
    assert not [name for name in events if "backend_compile" in name]
    jax.jit(lambda x: x - 5)(1)
    assert [name for name in events if "backend_compile" in name]
