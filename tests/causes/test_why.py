"""What ``why`` says of steps: causes, which are taken away in turn, losses, rows and names."""

import collections
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.causes.why import why
from tests.causes.programs import EXPLICIT, MESH, array


@pz.pytree_dataclass
class OfData(pz.nn.Layer):
    """A layer of a user, which does something with the data of a named array."""

    function: Callable[..., Any] = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, /, **side_inputs):
        return dataclasses.replace(value, data_array=self.function(value.data_array))


def on(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


def small(*spec, **options):
    return array(*spec, shape=(8, 8), **options)


def named(*spec, data=None, **sizes):
    sizes = sizes or {"batch": 8, "a": 8}
    shape = tuple(sizes.values())
    return pz.nx.NamedArray(collections.OrderedDict(sizes), data or array(*spec, shape=shape))


def planned(model, rules, mesh=MESH):
    return pzs.make_plan(model, mesh, rules, on_unnamed="replicate").restore_structs()


def linear(name="up", rules=(), mesh=MESH, inputs="a", outputs="b"):
    made = pz.nn.Linear.from_config(name, jax.random.key(0), {inputs: 8}, {outputs: 8})
    return planned(made, dict(rules), mesh)


TANH = pz.nn.Elementwise(jnp.tanh)


def behind(*layers, rules=()):
    return pz.nn.Sequential([linear(rules=rules), *layers])


def by_name(rules):
    return pzs.ConstrainShardingByName(MESH, rules)


def train(model, rules=(), optimizer_rules=None, spec=(), **options):
    """A train step of a model that takes the axis a, with its arguments."""

    def loss(*, model, rng, state, x):
        return jnp.mean(model(x).unwrap("batch", "b") ** 2), state, {}

    state = pzs.TrainState.initial_state(
        planned(model, dict(rules)), optax.adam(0.1), jax.random.key(0)
    )
    shardings = pzs.train_state_sharding(state, MESH, dict(rules), optimizer_rules)
    state = jax.tree.map(
        lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
        state,
        shardings,
    )
    return pzs.build_train_step_fn(loss, **options), (state,), {"x": named(*spec)}


def looked_up(axis):
    table = pz.nn.EmbeddingTable.from_config(
        "table", jax.random.key(0), vocab_size=16, embedding_axes={"a": 8}
    )
    tokens = named(data=array(axis, shape=(8,), dtype="int32"), batch=8)
    return planned(pz.nn.EmbeddingLookup(table), {}), (tokens,)


def stacked(axis):
    def block(init_base_rng):
        layers = [("up", {"a": 8}, {"b": 8}), ("down", {"b": 8}, {"a": 8})]
        key = jax.random.key(0)
        return pz.nn.Sequential([pz.nn.Linear.from_config(n, key, *sizes) for n, *sizes in layers])

    stack = pz.nn.LayerStack.from_sublayer_builder(
        builder=block, stack_axis="n", stack_axis_size=3, init_base_rng=None, builder_kwargs={}
    )
    return planned(pzs.roll_layer_stacks().apply(stack), {"b": axis}), (named(),)


def region(axis):
    spec = P(axis)
    inner = jax.shard_map(jnp.tanh, mesh=MESH, in_specs=P(), out_specs=spec, check_vma=False)
    return jax.jit(lambda x: inner(x) + 1), (small(),)  # The region.


def of_user(axis):
    pin = lambda y: jax.lax.with_sharding_constraint(y, on(axis))  # noqa: E731  # The user's.
    return behind(OfData(pin)), (named(),)


def declared(axis):
    return jax.jit(lambda x, w: x @ w, out_shardings=on(axis)), (small(), small())


def find_line(end):
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"  # {end}"))
    return f"test_why.py:{number}"


# A step for a mesh axis or None; the row that is asked about; kind, path and logical axis of the
# cause of the mesh axis.
CAUSES = {
    "input": (lambda a: (linear(), (named(a),)), "output up", "input", "argument", "batch"),
    "tokens": (looked_up, "output table", "input", "argument", "batch"),
    "parameter": (
        lambda a: (behind(pz.nn.RenameAxes("b", "c"), TANH, rules={"b": a}), (named(),)),
        "output up/elementwise",
        "parameter",
        "model/up.weights",
        "b",
    ),
    "constraint by name": (
        lambda a: (behind(by_name({"batch": a, "length": "model"})), (named(),)),
        "output up",
        "constraint layer",
        "up/constrain_sharding_by_name",
        "batch",
    ),
    "constraint behind": (
        lambda a: (behind(TANH, by_name({"b": a})), (named(),)),
        "output up",
        "constraint layer",
        "up/constrain_sharding_by_name",
        "b",
    ),
    "constraint by sharding": (
        lambda a: (behind(pzs.ConstrainSharding(on(None, a))), (named(),)),
        "output up",
        "constraint layer",
        "up/constrain_sharding",
        "b",
    ),
    "activations": (
        lambda a: (pzs.ConstrainActivations(linear(), MESH, ({"batch": a},)), (named(),)),
        "output up",
        "constraint layer",
        "up",
        "batch",
    ),
    "gathered": (
        lambda a: (pzs.GatherParameters(linear(), MESH, {"b": a}), (named(),)),
        "output up",
        "constraint layer",
        "up",
        "b",
    ),
    "declared result": (declared, "result result", "declared result", "result", None),
    "batch of a step": (
        lambda a: train(linear(), spec=(a,)),
        "output up",
        "input",
        "inputs/x",
        "batch",
    ),
    "jitted model": (
        lambda a: train(pzs.Jitted(linear()), {"b": a}),
        "output up",
        "parameter",
        "params/up.weights",
        "b",
    ),
    "computed again": (
        lambda a: train(pzs.Checkpointed(linear()), {"b": a}),
        "output up",
        "parameter",
        "params/up.weights",
        "b",
    ),
    "gradient": (
        lambda a: train(linear(), {"a": a}),
        "gradient params/up.weights",
        "parameter",
        "params/up.weights",
        "a",
    ),
    "gradient as the moments": (
        lambda a: train(linear(), optimizer_rules={"a": a}),
        "gradient params/up.weights",
        "train step",
        "params/up.weights",
        "a",
    ),
    "microbatches": (
        lambda a: train(linear(), {"b": a}, accumulate_steps=2),
        "gradient params/up.weights",
        "parameter",
        "params/up.weights",
        "b",
    ),
    "rolled stack": (stacked, "output up", "parameter", "model/up.weights", "b"),
    "shard_map": (region, "result result", "shard_map", find_line("The region."), None),
    "user": (of_user, "output up/of_data", "constraint", find_line("The user's."), None),
}


def ask(step, args, kwargs=None, **options):
    return why(step, *args, **(kwargs or {}), **options)


def find_row(report, name):
    (row,) = [row for row in report.rows if f"{row.kind} {row.path}" == name]
    return row


@pytest.mark.parametrize("name", CAUSES)
def test_cause_is_named_and_without_it_the_layout_goes(name):
    build, row, kind, path, logical_axis = CAUSES[name]
    (cause,) = find_row(ask(*build("data")), row).causes
    assert (cause.mesh_axis, cause.kind, cause.path) == ("data", kind, path)
    assert cause.logical_axis == logical_axis
    assert cause.rule == (f"{logical_axis!r} -> 'data'" if logical_axis else "")
    assert find_row(ask(*build(None)), row).spec == P()


def test_parameter_without_a_layout_gets_that_of_its_use():
    model = pz.nn.Linear.from_config("up", jax.random.key(0), {"a": 8}, {"b": 8})
    model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pz.freeze_params(model))
    report = why(pz.nn.Sequential([model, by_name({"b": "model"})]), named("data"))
    (cause,) = find_row(report, "parameter model/up.weights").causes
    assert (cause.kind, cause.logical_axis) == ("constraint layer", "b")


def test_explicit_mesh_is_as_its_auto_twin():
    model, x = linear(rules={"b": "model"}, mesh=EXPLICIT), small("data", mesh=EXPLICIT)
    report = why(lambda x, w: jnp.tanh(x @ w), x, small(None, "model", mesh=EXPLICIT))
    kinds = [(cause.kind, cause.path) for cause in find_row(report, "result result").causes]
    assert kinds == [("input", "x"), ("input", "w")]
    (row,) = why(model, named(data=x)).of_kind("output")
    assert [cause.kind for cause in row.causes] == ["input", "parameter"]


# Losses


def losses_of(report, row):
    return [
        (one.reason, one.cause.mesh_axis, one.place, one.gathered)
        for one in find_row(report, row).losses
    ]


def test_operation_and_layer_of_a_loss_are_named():
    cut = OfData(lambda y: y.reshape(3, 4, 8).transpose(1, 0, 2).reshape(12, 8))
    report = why(behind(cut, TANH), named("data", batch=12, a=8))
    lost = [("cut", "data", "reshape in up/of_data", "")]
    assert losses_of(report, "output up/elementwise")[:1] == lost
    what = "'batch' (12) is cut or joined there, and the parts do not fit"
    text = f"'data' of input argument ('batch' -> 'data') is lost at reshape in up/of_data: {what}"
    assert text in " ".join(str(report).split())


def test_constraint_that_loses_and_rivals_are_named():
    report = why(behind(by_name({"batch": None})), named("data"))
    place = "a constraint in up/constrain_sharding_by_name"
    assert losses_of(report, "output up") == [("pinned", "data", place, "")]
    report = why(lambda x, y: x * y, small("data"), small(None, "data"))
    assert losses_of(report, "result result") == [("used", "data", "mul", "")]
    assert "'data' of input x splits another dimension there" in " ".join(str(report).split())
    report = why(lambda x: x[:6], small("data"))
    assert losses_of(report, "result result") == [("uneven", "data", "the end of the step", "")]


def test_parameter_that_is_gathered_for_use_is_no_loss():
    model = pz.nn.Sequential([linear("m/up", {"b": "data"}), linear("m/down", {}, inputs="b")])
    report = why(model, named("data"))
    place = "a matrix product in m/up"
    assert losses_of(report, "output m/up") == [("used", "data", place, "model/m/up.weights")]
    assert losses_of(report, "output m/down") == []
    assert report.lost == ()
    assert f"model/m/up.weights is gathered over 'data' for {place}" in str(report)


# Rows


@pytest.fixture(scope="module")
def blocks():
    names = [f"block_{i}/{name}" for i in range(2) for name in ("up", "down")]
    layers = [linear(n, {}, inputs="ab"[i % 2], outputs="ba"[i % 2]) for i, n in enumerate(names)]
    model = pz.nn.Sequential([*layers, linear("head")])
    return ask(*train(model, {"b": "model"}, spec=("data",)))


def test_plain_arrays_have_no_row_in_the_table_and_equal_blocks_one(blocks):
    assert [len(blocks.of_kind(kind)) for kind in ("output", "gradient", "parameter")] == [6, 5, 5]
    data = json.loads(blocks.to_json())
    assert (len(data["rows"]), len(data["arrays"])) == (5, 16)
    lines = str(blocks).splitlines()
    assert sum("block_{0-1}/" in line for line in lines) == 2
    assert max(map(len, lines)) <= 100


def test_at_narrows_and_tells_the_way(blocks):
    narrow = lambda at: ask(*train(linear("m/up"), {"b": "model"}), at=at)  # noqa: E731
    expected = ["output m/up", "gradient params/m/up.weights", "parameter params/m/up.weights"]
    for at in ("m/up", "up", "**/up", "m"):
        found = narrow(at)
        assert [f"{row.kind} {row.path}" for row in found.rows][:1] == expected[: len(found.rows)][
            :1
        ]
    assert "('b' -> 'model') through a matrix product in m/up" in str(narrow("m/up"))
    assert narrow("up.weights").rows == narrow("params/m/up.weights").rows
    for at, near in (("m/pu", "m/up"), ("up.wieghts", "up.weights")):
        with pytest.raises(pzs.SelectionError) as caught:
            narrow(at)
        assert f"at={near!r}" in caught.value.problems[0].fix
    with pytest.raises(pzs.RuleTypeError):
        narrow(3)


def test_step_without_a_mesh_says_so():
    report = why(lambda x: x + 1, jnp.ones(8))
    assert "no argument lies over a mesh" in str(report)
    assert not report.rows[0].causes


CHILD = """
import jax, jax.monitoring
from penzai_shard.jax_internals import compiler
events, compiler.compile_bytecode = [], None
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
from tests.propagation.programs import SHARD_MAPS, array, lower_shard_map
from penzai_shard.causes.ways import Ways
from penzai_shard.causes.why import why
from penzai_shard.propagation.flat import propagate_lowered
for name in SHARD_MAPS:
    ways = Ways(propagate_lowered(lower_shard_map(name)))
    for value in ways.makers.keys() | ways.users.keys():
        for axes in ways.values[value].spec or ():
            assert all(ways.cause(value, axis).kind != "unknown" for axis in axes), name
        ways.lost(value)
report = why(jax.jit(lambda x: (x @ x).sum(0)), array("data"))
assert report.rows[0].summed == ("data",), report
assert not [event for event in events if "backend_compile" in event], events
jax.jit(lambda x: x + 1)(1)
assert [event for event in events if "backend_compile" in event], events
"""


def test_shard_maps_are_answered_and_nothing_is_compiled():
    """In a process of its own: of some of these programs Shardy's notes can end a process."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
