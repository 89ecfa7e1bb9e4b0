"""Small programs with one cause each: it is the one that is named, and without it the layout goes.

The judge is deletion, which shares no code with what finds causes: the same program is built
without the cause, and the array is then whole along the mesh axis.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from penzai import pz

from penzai_shard import (
    Checkpointed,
    ConstrainActivations,
    ConstrainSharding,
    ConstrainShardingByName,
    Jitted,
    why,
)
from tests.inspection.sharding_causes.laid_out_programs import (
    MESH,
    P,
    laid_out,
    linear,
    named,
    on,
    planned,
    stacked,
    struct,
    train_step,
    x,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program with a cause that can be left out.

    Attributes:
        build: Gives step, arguments and keywords, with the cause or without.
        row: Kind and label of the array that is asked about.
        mesh_axis: The mesh axis.
        cause: Its kind and its path.
        logical_axis: The logical axis of it.
        rule: The rule of it.
    """

    build: Callable[[bool], Any]
    row: tuple[str, str]
    mesh_axis: str
    cause: tuple[str, str]
    logical_axis: Any = None
    rule: str = ""


def _input_of_a_layer(there):
    return linear("up"), (x(P("data") if there else P()),)


def _tokens_that_are_looked_up(there):
    table = pz.nn.EmbeddingTable.from_config(
        "table", jax.random.key(0), vocab_size=16, embedding_axes={"a": 8}
    )
    tokens = named(P("data") if there else P(), "int32", batch=8)
    return planned(pz.nn.EmbeddingLookup(table), {}), (tokens,)


def _parameter(there):
    return linear("up", on(there, b="model")), (x(),)


def _parameter_through_layers(there):
    up = linear("up", on(there, b="model"))
    renamed = pz.nn.RenameAxes("b", "b2")
    return pz.nn.Sequential([up, renamed, pz.nn.Elementwise(jnp.tanh)]), (x(),)


def _bias(there):
    affine = pz.nn.Affine.from_config("l", jax.random.key(0), {"a": 8}, {"b": 8})
    rules = {}
    model = planned(affine, rules)
    spec = P("model") if there else P()
    bias = pz.select(model).at_instances_of(pz.nn.AddBias).pick_nth_selected(0)
    value = lambda v: dataclasses.replace(  # noqa: E731
        v, value=named(spec, b=8)
    )
    return bias.at(lambda layer: layer.bias).apply(value), (x(),)


def _constraint_by_name(there):
    rules = {"length": "data", "batch": "data" if there else None}
    return pz.nn.Sequential([linear("up"), ConstrainShardingByName(MESH, rules)]), (x(),)


def _constraint_behind(there):
    rules = {"b": "model"} if there else {"b": None}
    constraint = ConstrainShardingByName(MESH, rules)
    return pz.nn.Sequential([linear("up"), pz.nn.Elementwise(jnp.tanh), constraint]), (x(),)


def _constraint_of_one_rule_of_two(there):
    rules = {"b": "model", **on(there, batch="data")}
    return pz.nn.Sequential([linear("up"), ConstrainShardingByName(MESH, rules)]), (x(),)


def _constraint_by_sharding(there):
    pin = ConstrainSharding(laid_out(P(None, "model") if there else P()))
    return pz.nn.Sequential([linear("up"), pin]), (x(),)


def _activations_of_a_layer(there):
    rules = {"batch": "data" if there else None}
    return ConstrainActivations(linear("up"), MESH, inputs=(rules,)), (x(),)


def _constraint_of_a_user(there):
    def step(x, w):
        y = x @ w
        return jax.lax.with_sharding_constraint(y, laid_out(P("data" if there else None))) + 1

    return step, (struct(8, 8), struct(8, 8))


@pz.pytree_dataclass
class Pinned(pz.nn.Layer):
    """A layer of a user."""

    spec: PartitionSpec = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, /, **_):
        pinned = jax.lax.with_sharding_constraint(value.data_array, laid_out(self.spec))
        return dataclasses.replace(value, data_array=pinned)


def _constraint_in_a_layer_of_a_user(there):
    return pz.nn.Sequential([linear("up"), Pinned(P("data" if there else None))]), (x(),)


def _declared_result(there):
    spec = P("data") if there else P()
    return jax.jit(lambda x, w: x @ w, out_shardings=laid_out(spec)), (struct(8, 8), struct(8, 8))


def _second_declared_result(there):
    def step(model, x):
        return x + 1, model(x)

    spec = laid_out(P(None, "model") if there else P())
    jitted = jax.jit(
        step,
        out_shardings=(laid_out(), pz.nx.NamedArray(collections.OrderedDict(batch=8, b=8), spec)),
    )
    return jitted, (pz.freeze_params(linear("up")), x())


def _gradient_as_its_parameter(there):
    return train_step(linear("up"), on(there, a="data"))


def _gradient_as_the_moments(there):
    return train_step(linear("up"), {}, optimizer_rules=on(there, a="data"))


def _gradient_in_microbatches(there):
    return train_step(linear("up"), on(there, b="model"), accumulate_steps=2)


def _batch_of_a_train_step(there):
    return train_step(linear("up"), {}, split=P("data") if there else P())


def _parameter_of_a_jitted_model(there):
    return train_step(Jitted(linear("up")), on(there, b="model"))


def _parameter_of_a_checkpointed_layer(there):
    return train_step(Checkpointed(linear("up")), on(there, b="model"))


def _parameter_in_a_loop(there):
    return stacked(on(there, b="model")), (x(),)


def _specs_of_a_region(there):
    spec = P("data") if there else P()
    region = jax.shard_map(jnp.tanh, mesh=MESH, in_specs=P(), out_specs=spec, check_vma=False)
    return jax.jit(lambda x: region(x) + 1), (struct(8, 8),)


SOURCE = pathlib.Path(__file__).read_text().splitlines()
LINE_OF_REGION = (
    f"tests/inspection/sharding_causes/{pathlib.Path(__file__).name}:"
    f"{1 + SOURCE.index('    return jax.jit(lambda x: region(x) + 1), (struct(8, 8),)')}"
)

CASES = {
    "input of a layer": Case(
        _input_of_a_layer, ("output", "up"), "data", ("input", "argument"), "batch"
    ),
    "tokens that are looked up": Case(
        _tokens_that_are_looked_up, ("output", "table"), "data", ("input", "argument"), "batch"
    ),
    "parameter": Case(
        _parameter, ("output", "up"), "model", ("parameter", "model/up.weights"), "b"
    ),
    "parameter through layers": Case(
        _parameter_through_layers,
        ("output", "up/elementwise"),
        "model",
        ("parameter", "model/up.weights"),
        "b",
    ),
    "bias": Case(_bias, ("output", "l"), "model", ("parameter", "model/l/AddBias.bias"), "b"),
    "constraint by name": Case(
        _constraint_by_name,
        ("output", "up"),
        "data",
        ("constraint layer", "up/constrain_sharding_by_name"),
        "batch",
        "'batch' -> 'data'",
    ),
    "constraint behind": Case(
        _constraint_behind,
        ("output", "up"),
        "model",
        ("constraint layer", "up/constrain_sharding_by_name"),
        "b",
        "'b' -> 'model'",
    ),
    "one rule of two": Case(
        _constraint_of_one_rule_of_two,
        ("output", "up"),
        "data",
        ("constraint layer", "up/constrain_sharding_by_name"),
        "batch",
        "'batch' -> 'data'",
    ),
    "constraint by sharding": Case(
        _constraint_by_sharding,
        ("output", "up"),
        "model",
        ("constraint layer", "up/constrain_sharding"),
        "b",
    ),
    "activations of a layer": Case(
        _activations_of_a_layer,
        ("output", "up"),
        "data",
        ("constraint layer", "up"),
        "batch",
        "'batch' -> 'data'",
    ),
    "declared result": Case(
        _declared_result, ("result", "result"), "data", ("declared result", "result")
    ),
    "second declared result": Case(
        _second_declared_result,
        ("output", "up"),
        "model",
        ("declared result", "result/1"),
        "b",
    ),
    "gradient as its parameter": Case(
        _gradient_as_its_parameter,
        ("gradient", "up.weights"),
        "data",
        ("parameter", "params/up.weights"),
        "a",
    ),
    "gradient as the moments": Case(
        _gradient_as_the_moments,
        ("gradient", "up.weights"),
        "data",
        ("train step", "params/up.weights"),
        "a",
    ),
    "gradient in microbatches": Case(
        _gradient_in_microbatches,
        ("gradient", "up.weights"),
        "model",
        ("parameter", "params/up.weights"),
        "b",
    ),
    "batch of a train step": Case(
        _batch_of_a_train_step, ("output", "up"), "data", ("input", "inputs/x"), "batch"
    ),
    "parameter of a jitted model": Case(
        _parameter_of_a_jitted_model,
        ("output", "up"),
        "model",
        ("parameter", "params/up.weights"),
        "b",
    ),
    "parameter of a checkpointed layer": Case(
        _parameter_of_a_checkpointed_layer,
        ("output", "up"),
        "model",
        ("parameter", "params/up.weights"),
        "b",
    ),
    "parameter in a loop": Case(
        _parameter_in_a_loop,
        ("output", "up"),
        "model",
        ("parameter", "model/up.weights"),
        "b",
    ),
    "specs of a region": Case(
        _specs_of_a_region, ("result", "result"), "data", ("shard_map", LINE_OF_REGION)
    ),
}


def asked(case, there):
    step, args, *kwargs = case.build(there)
    report = why(step, *args, **dict(*kwargs))
    rows = [row for row in report.rows if (row.kind, row.label) == case.row]
    assert rows, [row.what for row in report.rows]
    return rows


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_and_without_it_the_layout_goes(name: str) -> None:
    case = CASES[name]
    causes = [
        cause
        for row in asked(case, there=True)
        for cause in row.causes
        if cause.mesh_axis == case.mesh_axis
    ]
    assert causes
    for cause in causes:
        assert (cause.kind, cause.path) == case.cause
        assert (cause.logical_axis, cause.rule) == (case.logical_axis, case.rule)
        assert not cause.also
    for row in asked(case, there=False):
        assert case.mesh_axis not in {axis for axes in row.spec for axis in axes}


def test_constraints_of_users_are_named_by_their_line() -> None:
    for build in (_constraint_of_a_user, _constraint_in_a_layer_of_a_user):
        step, args = build(there=True)
        (cause,) = {c.source: c for row in why(step, *args).rows for c in row.causes}.values()
        assert cause.kind == "constraint"
        file, _, line = cause.path.rpartition(":")
        assert "with_sharding_constraint(" in SOURCE[int(line) - 1]
        assert __file__.endswith(file)
        step, args = build(there=False)
        assert all(row.is_whole for row in why(step, *args).rows)
