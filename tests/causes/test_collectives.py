"""Why the collectives of train steps are there, and that layouts are those that are compiled."""

import collections
import dataclasses
import functools
import math
import random

import jax
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
from tests.layouts.transformers import loss_fn, make_builder

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
    "accumulated": (Layout.fully_sharded(**SMALL), TWO, {}, TWICE),
    "rolled, fully sharded": (Layout.fully_sharded(**SMALL), DATA, {"blocks": 2}, {}),
    "rolled, two dimensions": (Layout.two_dimensional(**SMALL), TWO, {"blocks": 2}, {}),
}


@functools.cache
def explained(name):
    """What ``why`` says of a step, and of its collectives."""
    layout, sizes, options, more = STEPS[name]
    mesh = pzs.make_mesh(sizes, abstract=True)
    build = make_builder(stacked="blocks" in options, **options)
    state, step = layout.build(
        (lambda: pzs.roll_layer_stacks().apply(build())) if "blocks" in options else build,
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1, momentum=0.9),
        rng=jax.random.key(0),
        **more,
    )
    over = NamedSharding(mesh, P(("replica", "data") if "replica" in sizes else "data"))
    tokens = jax.ShapeDtypeStruct((16, 9), "int32", sharding=over)
    report = why(pzs.compile_step(step, state, tokens=tokens))
    return report, report.collectives()


def has_reason(row):
    return bool(row.because)


@pytest.mark.parametrize("name", STEPS)
def test_layouts_are_those_that_are_compiled_and_collectives_have_a_reason(name):
    """Matrix products of the forward pass have on a device the size that XLA computes there."""
    report, found = explained(name)
    assert found.compiled is report.compiled  # Once.
    ways, phase = report.words.ways, report.words.step.layers.phase
    compiled = collections.defaultdict(set)
    for one in found.compiled.program:
        compiled[one.op_name] |= {math.prod(computed.shape) for computed in one.results}
    compared = 0
    for one in ways.program.operations:
        is_product = one.kind == "stablehlo.dot_general" and phase(one.name) == "forward"
        if is_product and one.name in compiled:
            value = ways.values[one.results[0]]
            sizes = [ways.program.mesh[axis] for axes in value.spec or () for axis in axes]
            # Inside of a shard_map shapes are those of one device already.
            assert math.prod(value.shape) // math.prod(sizes) in compiled[one.name]
            compared += 1
    assert min(compared, len(found.rows)) >= 8
    assert sum(map(has_reason, found.rows)) >= 0.95 * len(found.rows)
    assert all(row.rules for row in found.rows if row.because)
    sent = sum(row["sends in a step"] for row in found.by_rule().to_data()["rows"])
    assert sent == pytest.approx(found.compiled.collectives.wire_bytes)


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


def test_rules_save_memory():
    found = explained("two_dimensional")[1]
    saved = {row["rule"]: row["saves of memory"] for row in found.by_rule().to_data()["rows"]}
    assert saved["'batch' -> 'data'"] == 0
    # Three matrices of 16 x 32 floats, with a moment each, of which a device has an eighth.
    assert saved["'neurons' -> 'model'"] == 2 * 3 * 16 * 32 * 4 / 8
    assert all(text in str(found) for text in ("gathered over 'data'", "devices sum over 'model'"))


def test_gathers_under_one_name_are_each_explained_by_what_they_move():
    mesh = pzs.make_mesh(DATA, abstract=True)
    rows = jax.ShapeDtypeStruct((16, 16), "float32", sharding=NamedSharding(mesh, P("data")))

    def run(weights, x):
        whole = jax.tree.map(
            lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P())), weights
        )
        return jax.numpy.tanh(x @ whole["a"]) @ whole["b"]

    rows_of = why(jax.jit(run), {"a": rows, "b": rows}, rows).collectives().rows
    moved = {row.part.moves: row.because[0].cause.path for row in rows_of}
    assert moved == {path: path for path in ("weights/a", "weights/b")}
