"""Claims on compiled steps: arrays and memory are the program's own, and nothing runs."""

import concurrent.futures
import functools
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.inspection.compiling import read_standard_error
from penzai_shard.jax_internals.compiler import kept_arguments
from tests.models import LinenBlock, model

MESH = pzs.make_mesh({"data": 4, "model": 2})
SPLIT = NamedSharding(MESH, P("data"))
X = jax.device_put(jnp.ones((8, 8)), SPLIT)
NAMED = pz.nx.wrap(X, "batch", "features")


def mlp_loss(model, rng, state, x):
    return jnp.mean(model(x).unwrap("batch", "features") ** 2), state, {}


@functools.cache
def initial():
    state = pzs.TrainState.initial_state(model("penzai mlp"), optax.adam(1e-3), jax.random.key(0))
    return jax.device_put(state, pzs.train_state_sharding(state, MESH, {"features": "model"}))


def train_step(**options):
    return pzs.build_train_step_fn(mlp_loss, donate_params_and_state=True, **options)


STEPS = {
    "train": lambda: (train_step(), initial(), {"x": NAMED}),
    "accumulate": lambda: (train_step(accumulate_steps=2), initial(), {"x": NAMED}),
    "evaluation": lambda: (pzs.build_eval_step_fn(mlp_loss), initial(), {"x": NAMED}),
    "Jitted": lambda: (pzs.Jitted(model("counted mlp")), NAMED, {}),
    "linen": lambda: (jax.jit(lambda own, x: LinenBlock().apply(own, x)), model("linen"), {"x": X}),
    "equinox": lambda: (eqx.filter_jit(lambda m, x: m.mlp(x[0])), model("equinox"), {"x": X}),
}


@functools.cache
def compiled(name):
    step, argument, inputs = STEPS[name]()
    return pzs.compile_step(step, argument, **inputs)


# Arrays and memory


@pytest.mark.parametrize("name", STEPS)
def test_compile_step_knows_the_arguments_of_its_program(name):
    own = compiled(name)
    kept = kept_arguments(own.step.lowered)
    used = [array for i, array in enumerate(own.step.arguments) if i in kept]
    names = [parameter.op_name for parameter in own.program.parameters(own.program.entry)]
    assert sorted(names) == sorted(array.name for array in used)
    assert sum(array.bytes_per_device for array in used) == own.figures.arguments
    # Only a variable that is on no mesh before the first step.
    assert [path for path, _, _ in own.recompilation] == ["model/count"] * (name == "Jitted")


def test_compile_step_fills_in_what_the_compiler_chose():
    step = jax.jit(lambda unused, w, x: (x @ w, x))
    own = pzs.compile_step(step, X, jnp.ones((8, 8)), X)
    (_, w, x), (product, _) = own.step.arguments, own.step.results
    assert (w.spec, w.bytes_per_device, x.spec, product.spec) == (P(), 256, P("data"), P("data"))
    (note,) = own.step.notes
    assert ": w" in note


def test_marks_change_neither_memory_nor_collectives():
    own, (step, state, inputs) = compiled("train"), STEPS["train"]()
    bare = step.lowerable(state, **inputs)
    plain = pzs.compile_step(bare.jitted, *bare.args)
    assert plain.figures == own.figures
    assert plain.collectives.wire_bytes == own.collectives.wire_bytes


def test_compile_step_keeps_compiler_options():
    function = jax.jit(lambda x: x, compiler_options={"xla_no_such_flag": 1})
    with pytest.raises(pzs.CompilationError):
        pzs.compile_step(function, X)


def test_report_of_a_compiled_step_has_a_row_for_each_layer():
    own = compiled("train")
    report = pzs.compile_step(own).report()
    assert (pzs.collectives(own), pzs.device_memory(own)) == (own.collectives, own.memory)
    rows = {row[0]: row[1:] for row in report.rows}
    assert sum(row[0] or 0 for row in rows.values()) == own.memory.resident + own.memory.inputs
    assert sum(row[2] or 0 for row in rows.values()) == own.collectives.wire_bytes
    labels = ["mlp/Affine_0/Linear", "mlp/Affine_0/AddBias", "mlp/Affine_1/Linear"]
    assert [path for path in rows if path in labels] == labels
    on_host = jax.device_put(X, SPLIT.with_memory_kind("pinned_host"))
    step = jax.jit(lambda x, y: jax.device_put(x, SPLIT) + y)
    assert pzs.compile_step(step, on_host, X).report().rows[0][:2] == ("inputs", 64)


def test_verdict_knows_no_sum_of_loops_that_it_cannot_count():
    step = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: x @ y, x))
    assert "at least 0 B" in pzs.compile_step(step, X, 3).report().verdict


# The second step


ROWS, COLUMNS = P("data", None), P(None, "data")
# Specs of an argument and of its next value, inside the step and by out_shardings; and the name of
# another argument, which is the first one if it begins with "a".
LAYOUTS = [
    (COLUMNS, COLUMNS, None, "count"),
    (ROWS, COLUMNS, None, "count"),
    (ROWS, P("data"), None, "a count"),
    (ROWS, P("data"), None, "z count"),
    (ROWS, P("data"), P("data"), "z count"),
    (None, P("data"), None, "count"),
]


@pytest.mark.parametrize(("before", "inside", "after", "count"), LAYOUTS)
def test_recompilation_is_what_jax_does(before, inside, after, count):
    def step(state, x):
        w = jax.lax.with_sharding_constraint(state["w"] + x, NamedSharding(MESH, inside))
        return {"w": w, count: state[count] + 1}

    out_shardings = {"w": after and NamedSharding(MESH, after), count: None}
    step = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
    weights = jnp.ones((8, 8))
    if before is not None:
        weights = jax.device_put(weights, NamedSharding(MESH, before))
    state = {"w": weights, count: jax.device_put(0, NamedSharding(MESH, P()))}
    own = pzs.compile_step(step, state, X)
    notes = [note for note in own.report().notes if "step 2" in note]
    assert len(notes) == len(own.recompilation)
    step(step(state, X), X)
    assert step._cache_size() == 1 + len(own.recompilation)


def test_recompilation_knows_weak_dtypes():
    # A number of Python comes back with a dtype that is its own.
    scale = jax.jit(lambda state: {"n": state["n"] * np.float32(2)}, donate_argnums=0)
    own = pzs.compile_step(scale, {"n": jnp.asarray(1.0)})
    assert own.recompilation == (("state/n", "weak float32", "float32"),)


# What the compiler warns of


def test_note_of_a_value_that_is_gathered_whole_names_the_layer(capfd):
    fine, coarse = NamedSharding(MESH, P(("data", "model"))), NamedSharding(MESH, P(None, "data"))
    pins = [pzs.ConstrainSharding(sharding) for sharding in (fine, coarse)]
    sine = pz.nn.Elementwise(jnp.sin)
    x = pz.nx.wrap(jnp.ones((16, 16)), "batch", "features")
    own = pzs.compile_step(pz.nn.Sequential([sine, pins[0], sine, pins[1]]), x)
    assert any("of sequential/constrain_sharding" in note for note in own.step.notes)
    assert "Involuntary" not in capfd.readouterr().err


def test_note_of_a_value_that_is_gathered_whole_names_an_argument_by_its_path():
    state = {"w": jnp.ones((8, 8), device=NamedSharding(MESH, P("data")))}
    columns = NamedSharding(MESH, P(None, "model"))
    pin = jax.jit(lambda state: 2 * jax.lax.with_sharding_constraint(state["w"], columns))
    assert any(" of state/w whole" in note for note in pzs.compile_step(pin, state).step.notes)


def test_other_words_of_the_compiler_are_passed_on(capfd):
    def write(number):
        lines = []
        with read_standard_error(lines):
            for _ in range(20):
                os.write(2, b"%d\n" % number)
                os.sched_yield()
        return lines

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert [*threads.map(write, range(40))] == [[f"{number}\n"] * 20 for number in range(40)]
    assert len(capfd.readouterr().err.split()) == 800
