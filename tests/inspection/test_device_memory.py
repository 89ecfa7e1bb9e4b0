"""What a step needs of a device, against the arrays themselves and XLA's own analysis."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

import penzai_shard as pzs
from penzai_shard.inspection.memory import make_memory_report

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"embedding": "data", "neurons": "model"}


def build(blocks=2, wrap=lambda block: block):
    linear = functools.partial(pz.nn.Linear.from_config, init_base_rng=jax.random.key(0))
    wide, narrow = {"neurons": 32}, {"embedding": 16}
    layers = []
    for number in range(blocks):
        up = linear(f"lm/block_{number}/up", input_axes=narrow, output_axes=wide)
        down = linear(f"lm/block_{number}/down", input_axes=wide, output_axes=narrow)
        layers.append(wrap(pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down])))
    return pz.nn.Sequential(layers)


def squares(model, rng, state, x):
    return (model(x).unwrap("batch", "embedding") ** 2).sum(), state, {}


def make_step(rules=RULES, model=build, examples=8, donate=True):
    """A step with the state and the input to call it with."""

    def init():
        return pzs.TrainState.initial_state(model(), optax.adam(1e-3), jax.random.key(1))

    shardings = pzs.train_state_sharding(jax.eval_shape(init), MESH, rules)
    state = jax.jit(init, out_shardings=shardings)()
    x = pzs.shard_batch(pz.nx.ones({"batch": examples, "embedding": 16}), MESH, {"batch": "data"})
    return pzs.build_train_step_fn(squares, donate_params_and_state=donate), state, x


def bytes_there(*trees):
    """What arrays take on the first device."""
    leaves = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


@pytest.fixture(scope="module")
def sharded():
    step, state, x = make_step()
    return step, state, x, pzs.compile_step(step, state, x=x)


def test_items_are_what_arrays_take_and_what_xla_says(sharded):
    step, state, x, compiled = sharded
    report = compiled.memory
    assert report.parameters == bytes_there(state.params)
    assert report.optimizer_state == bytes_there(state.opt_state)
    assert (report.inputs, report.resident) == (bytes_there(x), bytes_there(state))
    stats = step.lower(state, x=x).compile().memory_analysis()
    assert report.outputs == stats.output_size_in_bytes
    assert report.donated == stats.alias_size_in_bytes > 0
    assert report.temporaries == stats.temp_size_in_bytes > 0
    # The loss uses no random key, so JAX leaves it out of the program; it is there all the same.
    there = report.resident + report.inputs
    assert (there - stats.argument_size_in_bytes, report.padding) == (8, 0)
    others = report.temporaries + stats.generated_code_size_in_bytes
    assert report.total == there + report.outputs - report.donated + others


def test_rows_add_up_and_a_parameter_has_its_statistics_with_it(sharded):
    _, state, _, compiled = sharded
    rows = compiled.memory.to_data()["rows"]
    assert sum(row["per device"] or 0 for row in rows) == compiled.memory.total
    one = bytes_there(state.params["lm/block_0/up.weights"])
    sizes = [row["per device"] for row in rows if row["memory"] == "lm/block_0/up.weights"]
    assert sizes == [one, 2 * one]


def test_peak_names_the_layers_whose_activations_wait_for_the_backward_pass():
    step, state, x = make_step({}, examples=4096)
    compiled = pzs.compile_step(step, state, x=x)
    report = compiled.memory
    kept = [row.bytes for row in report.peak if row.phase == "forward" and "block" in row.layer]
    # Of 1024 examples 32 neurons behind each tanh, whose derivative needs them.
    assert 2 * 1024 * 32 * 4 <= sum(kept) <= report.temporaries
    assert sum(row.bytes for row in report.peak) <= 2 * report.temporaries
    figures = compiled.figures._replace(temporaries=100 * report.temporaries)
    assert make_memory_report(compiled.step, figures, compiled.program).peak == ()


def test_donation_saves_what_is_said(sharded):
    step, state, x = make_step(donate=False)
    report, donating = pzs.device_memory(step, state, x=x), sharded[-1].memory
    # The number of the step is an argument that is not donated.
    saves = report.parameters + report.optimizer_state + 4
    assert (report.donatable, donating.donatable) == (saves, 4) == (donating.donated + 4, 4)
    assert donating.total < report.total
    said = ["donate_params_and_state" in str(each) for each in (report, donating)]
    assert said == [True, False]


def test_donation_is_possible():
    # Next values that lie otherwise, or are of another dtype, cannot take the memory.
    rows, whole = (NamedSharding(MESH, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    params = dict.fromkeys("ab", jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows))
    step = jax.jit(
        lambda params: {"a": params["a"] + 1, "b": params["b"].astype(jnp.bfloat16)},
        out_shardings={"a": whole, "b": rows},
    )
    compiled = pzs.compile_step(step, params)
    assert compiled.step.next_arguments == {0: 0, 1: 1}
    assert compiled.memory.donatable == 0


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("TPU v5 lite", 15.75 * 2**30), ("NVIDIA H100 80GB HBM3", 60e9), ("cpu", None)],
)
def test_fits_is_said_where_the_limit_is_known(sharded, kind, limit):
    *_, compiled = sharded
    arguments = compiled.step, compiled.figures, compiled.program
    report = make_memory_report(*arguments, device_kind=kind)
    assert (report.limit, report.fits) == (limit, None if limit is None else True)
    assert make_memory_report(*arguments, 1024, device_kind=kind).fits is False


def test_evaluation_does_not_use_the_optimizer_state_which_is_there_all_the_same():
    _, state, x = make_step(examples=4096)
    compiled = pzs.compile_step(pzs.build_eval_step_fn(squares), state, x=x)
    report = compiled.memory
    assert report.resident == bytes_there(state)
    unused = report.total - compiled.figures.total
    assert unused >= report.optimizer_state == bytes_there(state.opt_state)
    for limit, fits in ((report.total, True), (report.total - 1, False)):
        found = make_memory_report(compiled.step, compiled.figures, compiled.program, limit)
        assert found.fits is fits


def test_arrays_in_the_memory_of_the_host_count_apart():
    host, device = (
        NamedSharding(MESH, PartitionSpec(), memory_kind=kind) for kind in ("pinned_host", "device")
    )
    model = pz.freeze_params(build(1))
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host), model)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=device)
    compiled = pzs.compile_step(jax.jit(lambda model, x: x.sum()), there, x)
    report = compiled.memory
    assert (report.host, report.inputs, report.parameters) == (bytes_there(model), 8 * 8 * 4, 0)
    assert (report.total, report.padding) == (compiled.figures.total, 0)
