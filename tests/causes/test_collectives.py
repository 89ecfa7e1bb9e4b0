"""Why the collectives of train steps are there, and that layouts are those that are compiled."""

import collections
import dataclasses
import functools
import math
import random

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import penzai_shard as pzs
from penzai_shard.causes.collectives import explain_collectives
from penzai_shard.causes.ways import Ways
from penzai_shard.causes.why import why
from penzai_shard.causes.words import StepWords
from penzai_shard.layouts.layout import Layout
from tests.layouts.transformers import loss_fn, make_builder, make_tokens

DATA, TWO, HYBRID = {"data": 8}, {"data": 4, "model": 2}, {"replica": 2, "data": 4}
SMALL = {"min_size": 128}
TWICE = {"accumulate_steps": 2, "batch_axis": 0}
# Layout, mesh, options of the model, of the step.
STEPS = {
    "data_parallel": (Layout.data_parallel(), DATA, {}, {}),
    "zero1": (Layout.zero1(**SMALL), DATA, {}, {}),
    "fully_sharded": (Layout.fully_sharded(**SMALL), DATA, {}, {}),
    "manual": (Layout.fully_sharded(manual=True, **SMALL), DATA, {}, {}),
    "hybrid": (Layout.hybrid(**SMALL), HYBRID, {}, {}),
    "tensor_parallel": (Layout.tensor_parallel(), TWO, {}, {}),
    "sequence_parallel": (Layout.sequence_parallel(), TWO, {}, {}),
    "two_dimensional": (Layout.two_dimensional(**SMALL), TWO, {}, {}),
    "grouped": (Layout.tensor_parallel(), TWO, {"heads": 2, "multiplier": 2}, {}),
    "accumulated": (Layout.fully_sharded(**SMALL), TWO, {}, TWICE),
    "rolled, fully sharded": (Layout.fully_sharded(**SMALL), DATA, {"blocks": 2}, {}),
    "rolled, two dimensions": (Layout.two_dimensional(**SMALL), TWO, {"blocks": 2}, {}),
}


@functools.cache
def explained(name):
    """What ``why`` says of a step, and of its collectives."""
    layout, sizes, options, more = STEPS[name]
    mesh = pzs.make_mesh(sizes, abstract=False)
    is_rolled = "blocks" in options
    build = make_builder(stacked=is_rolled, **options)
    state, step = layout.build(
        (lambda: pzs.roll_layer_stacks().apply(build())) if is_rolled else build,
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-3),
        rng=jax.random.key(0),
        **more,
    )
    batch = layout.shard_batch({"tokens": make_tokens(16)}, mesh, first_axis="batch")
    report = why(step, state, **batch)
    return report, report.collectives()


def has_reason(row):
    return bool(row.because)


@pytest.fixture(scope="module", params=STEPS)
def step(request):
    return explained(request.param)


def test_layouts_are_those_that_are_compiled(step):
    """Matrix products of the forward pass have on a device the size that XLA computes there."""
    report, found = step
    ways, layers = report.words.ways, report.words.step.layers
    compiled = collections.defaultdict(set)
    for one in found.compiled.program:
        for computed in one.results:
            compiled[one.op_name].add(math.prod(computed.shape))
    compared = 0
    for operation in ways.program.operations:
        is_forward = layers.phase(operation.name) == "forward"
        if operation.kind != "stablehlo.dot_general" or not is_forward:
            continue
        if sizes := compiled.get(operation.name):
            value = ways.values[operation.results[0]]
            names = [axis for axes in value.spec or () for axis in axes]
            count = math.prod(ways.program.mesh[name] for name in names)
            # Inside of a shard_map shapes are those of one device already.
            assert math.prod(value.shape) // count in sizes
            compared += 1
    assert compared >= 8


def test_nearly_all_collectives_have_a_reason(step):
    rows = step[1].rows
    assert len(rows) > 10
    assert sum(map(has_reason, rows)) >= 0.95 * len(rows)
    assert all(row.rules for row in rows if row.because)


def test_reasons_are_not_found_by_chance():
    """With the names of operations exchanged, hardly any collective has a reason.

    What is known to move a parameter or its gradient is left out: it is found by that, too.
    """
    rng, rows = random.Random(0), []
    for name in ("tensor_parallel", "sequence_parallel", "two_dimensional") * 4:
        report, found = explained(name)
        program = report.words.ways.program
        names = [one.name for one in program.operations]
        rng.shuffle(names)
        pairs = zip(program.operations, names, strict=True)
        operations = [dataclasses.replace(one, name=other) for one, other in pairs]
        ways = Ways(dataclasses.replace(program, operations=operations))
        every = explain_collectives(StepWords(ways, report.words.step), found.compiled).rows
        rows += [row for row in every if "params/" not in row.part.moves]
    assert len(rows) > 90
    assert sum(map(has_reason, rows)) < 0.1 * len(rows)


def test_rules_cost_all_bytes_and_save_memory():
    found = explained("two_dimensional")[1]
    assert sum(row.bytes for row in found.rows) == found.compiled.collectives.wire_bytes
    table = {row["rule"]: row for row in found.by_rule().to_data()["rows"]}
    sent = sum(row["sends in a step"] for row in table.values())
    assert sent == pytest.approx(found.compiled.collectives.wire_bytes)
    assert table["'batch' -> 'data'"]["saves of memory"] == 0
    # Three matrices of 16 x 32 floats, with two moments each, of which a device has an eighth.
    assert table["'neurons' -> 'model'"]["saves of memory"] == 3 * 3 * 16 * 32 * 4 / 8
    assert "gathered over 'data'" in str(found)


def test_reason_names_rule_and_layer():
    mesh = pzs.make_mesh(TWO, abstract=True)
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, P("data")))
    w = jax.ShapeDtypeStruct((16, 8), "float32", sharding=NamedSharding(mesh, P("data")))
    found = why(jax.jit(lambda x, w: (x @ w).sum(0)), x, w).collectives()
    said = {row.collective.kind: [str(one) for one in row.because] for row in found.rows}
    assert said["all-reduce"] == ["devices sum over 'data' of input x at a sum over dimensions"]
    assert said["all-gather"][0].startswith("'data' of input w is lost at a matrix product: ")
    assert jnp.isclose(sum(row.bytes for row in found.rows), found.compiled.collectives.wire_bytes)
