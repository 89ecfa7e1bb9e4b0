"""What ``device_memory`` says a step needs, against arrays that are there and JAX' own figures."""

import dataclasses
import json
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    build_eval_step_fn,
    build_train_step_fn,
    device_memory,
    shard_batch,
)
from penzai_shard.inspection.devices.device_figures import device_figures
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.program_view import CompiledProgram
from penzai_shard.library_apis.compiler_api import ExecutableMemory
from tests.small_train_steps import (
    EVERYTHING,
    MESH,
    batch,
    build_mlp,
    placed_state,
    report_of,
    squares,
)


def bytes_there(tree):
    """What one device really holds of a tree of arrays, in bytes."""
    device = MESH.devices.flat[3]
    shards = [
        shard.data
        for leaf in jax.tree.leaves(tree)
        for shard in (
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ).addressable_shards
        if shard.device == device
    ]
    return sum(np.asarray(shard).nbytes for shard in shards)


@pytest.fixture(scope="module")
def sharded():
    """A step that donates, its state, and its report."""
    state = placed_state(EVERYTHING, optax.adamw(1e-3))
    step = build_train_step_fn(squares, donate_params_and_state=True)
    return step, state, device_memory(step, state, x=batch())


@pytest.mark.parametrize(
    ("rules", "optimizer"),
    [
        ({"batch": "data"}, optax.sgd(0.1, momentum=0.9)),
        ({"neurons": "model", "batch": "data"}, optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    ],
)
def test_what_is_resident_is_what_shards_take_to_the_byte(rules, optimizer):
    state = placed_state(rules, optimizer)
    report = device_memory(build_train_step_fn(squares), state, x=batch(rules))
    assert report.parameters == bytes_there(state.params)
    assert report.optimizer_state == bytes_there(state.opt_state)
    assert report.constants == bytes_there(state.unbound_model)
    assert report.resident == bytes_there(state)
    assert report.inputs == bytes_there(batch(rules))
    assert sum(group.bytes for group in report.groups()) == report.resident


def test_figures_are_those_of_the_unmarked_step(sharded):
    step, state, report = sharded
    stats = step.trace(state, x=batch()).lower().compile().memory_analysis()
    assert report.resident == bytes_there(state)
    # JAX leaves the random key out of the program, as the loss uses none.
    assert report.unused == bytes_there(state.root_rng) == 8
    assert report.resident + report.inputs - report.unused == stats.argument_size_in_bytes
    assert report.padding == 0
    assert report.outputs == stats.output_size_in_bytes
    assert report.donated == stats.alias_size_in_bytes > 0
    assert report.temporaries == stats.temp_size_in_bytes > 0
    assert report.total == (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
        + 8
    )


def test_a_parameter_is_grouped_with_its_optimizer_state_and_equal_blocks_are_one(sharded):
    _, state, report = sharded
    groups = {group.path: group for group in report.groups()}
    assert next(iter(groups.values())).bytes == max(group.bytes for group in groups.values())
    largest = groups["params/block_*/up.weights"]
    assert largest.count == 2
    ups = [state.params[f"block_{i}/up.weights"] for i in range(2)]
    assert largest.array_bytes == bytes_there(ups)
    assert largest.optimizer_bytes == 2 * bytes_there(ups)
    assert largest.spec == PartitionSpec("data", "model")
    assert largest.axes_text == "embedding=16/data, neurons=32/model"
    alone = report.groups(collapse=False)
    assert {group.path for group in alone} >= {f"params/block_{i}/up.weights" for i in range(2)}


def test_the_table_is_as_long_for_80_blocks_as_for_two(sharded):
    _, _, report = sharded
    step = report.program.step
    blocks = {
        f"{name}.{i}": dataclasses.replace(array, path=array.path.replace("block_0", f"block_{i}"))
        for name, array in step.arguments.items()
        for i in range(2, 80)
        if "block_0" in array.path
    }
    arguments = {**step.arguments, **blocks}
    longer = dataclasses.replace(
        report.program, step=dataclasses.replace(step, arguments=arguments)
    )
    long = MemoryReport(longer, report.used | blocks.keys())
    assert long.parameters == 40 * report.parameters
    titles = {row[0] for row in report.table().rows}
    # What the compiler said was of two blocks.
    assert {row[0] for row in long.table().rows} - titles == {"padding"}
    assert len(long.table().rows) < 25
    assert ("params/block_*/up.weights", "80") in {row[:2] for row in long.table().rows}
    assert len(long.table(collapse=False).rows) > 160


def test_json_has_every_item_and_every_parameter_exactly(sharded):
    _, state, report = sharded
    data = json.loads(report.to_json())
    assert data["mesh"] == {"data": 4, "model": 2}
    assert {name: data[name] for name in report.items()} == report.items()
    held = {group["path"]: group["array_bytes"] for group in data["groups"]}
    for name, value in state.params.items():
        assert held[f"params/{name}"] == bytes_there(value)
    assert (data["limit"], data["fits"]) == (None, None)


def test_the_first_line_says_whether_the_step_fits(sharded):
    _, _, report = sharded
    program = report.program

    def verdict(**changes):
        changed = CompiledProgram(**{**vars(program), **changes})
        return str(MemoryReport(changed, report.used)).splitlines()[0]

    assert "how much a device has is not known (cpu)" in verdict()
    large = ExecutableMemory(196 * 2**30, 0, 0, 0, 0)
    assert verdict(device_kind="TPU v5 lite", memory=large) == (
        "needs 196.0 GiB of 15.75 GiB: does not fit, on each device of mesh (data=4, model=2) "
        "(TPU v5 lite)"
    )
    gpu = CompiledProgram(**{**vars(program), "device_kind": "NVIDIA H100 80GB HBM3"})
    shown = str(MemoryReport(gpu, report.used))
    assert "55.88 GiB is three quarters of its memory, which JAX takes by default" in shown
    assert ": fits, on each device" in verdict(memory_limit=10**9)
    assert "of 1.0 KiB: does not fit" in verdict(memory_limit=1024)


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("TPU v5", 95.74 * 2**30),
        ("TPU v5 lite", 15.75 * 2**30),
        ("NVIDIA A100-SXM4-80GB", 60e9),
        ("NVIDIA A100-PCIE-40GB", 30e9),
        ("NVIDIA H100 80GB HBM3", 60e9),
        ("NVIDIA H200", 105.75e9),
    ],
)
def test_memory_of_devices_that_are_not_there_is_known(kind, memory):
    assert device_figures(kind).memory == int(memory)


@pytest.mark.parametrize("kind", ["cpu", "TPU v99", "AMD Instinct MI300X", "H1000", ""])
def test_memory_of_unknown_devices_is_not_guessed(kind):
    assert device_figures(kind) is None


@pytest.fixture(scope="module")
def wide():
    """A step whose activations are much larger than its parameters."""
    state = placed_state({"batch": "data"}, optax.sgd(0.1))
    step = build_train_step_fn(squares, donate_params_and_state=True)
    x = shard_batch(pz.nx.ones({"batch": 4096, "embedding": 16}), MESH, {"batch": "data"})
    return device_memory(step, state, x=x)


def test_temporaries_are_the_activations_that_the_backward_pass_reads(wide):
    kept = [group for group in wide.temporary_groups if group.kind == "kept for the backward pass"]
    # The derivative of tanh is of its result: 32 neurons of 1024 examples in each of two blocks.
    # Linear layers keep their input, which is that or the result of the first block.
    sizes = {group.layer: (group.count, group.bytes) for group in kept}
    neurons, embedding = 1024 * 32 * 4, 1024 * 16 * 4
    assert sizes["sublayers/*"] == (3, 2 * neurons + embedding)
    estimated = sum(group.bytes for group in wide.temporary_groups)
    assert estimated == pytest.approx(wide.temporaries, rel=0.05)
    assert "kept for the backward pass" in str(wide)
    # Layers are called as in the table of collectives.
    (label,) = {group.label for group in kept if group.layer == "sublayers/*"}
    assert label == "block_0/down + sequential/sequential/elementwise"
    assert "sublayers" not in str(wide).partition("to save")[0]


def test_gathered_parameters_are_told_from_activations(sharded):
    _, _, report = sharded
    kinds = {}
    for group in report.temporary_groups:
        kinds[group.kind] = kinds.get(group.kind, 0) + group.bytes
    # Every matrix is gathered over "data", and may be kept in the order that its product reads.
    whole = 4 * 16 * 16 * 4
    assert 0 < kinds["gathered"] + kinds.get("copied parameters", 0) <= whole
    # What is kept of two examples is small beside them.
    assert 0 < kinds["kept for the backward pass"] <= whole / 4


def test_temporaries_are_not_explained_where_the_estimate_is_far_off(wide):
    memory = dataclasses.replace(wide.program.memory, temporaries=100 * wide.temporaries)
    program = dataclasses.replace(wide.program, memory=memory)
    assert MemoryReport(program, wide.used).temporary_groups == ()


def test_a_step_of_128_gib_takes_nothing_of_this_process():
    def build():
        return build_mlp(1, 2**17, 2**16)

    rules = {"embedding": "data", "neurons": "model"}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    live = {id(array) for array in jax.live_arrays()}
    report = report_of(
        rules, build=build, optimizer=optax.sgd(0.1, momentum=0.9), split="data", embedding=2**17
    )
    assert report.parameters == report.optimizer_state == 2 * 2**33 * 4 // 8
    assert str(report).startswith("needs ")
    # Keys and counts of states are made, and nothing else.
    made = [array for array in jax.live_arrays() if id(array) not in live]
    assert sum(array.nbytes for array in made) < 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # in KiB


def test_an_evaluation_step_uses_no_optimizer_state_and_gives_no_advice_to_donate(sharded):
    _, state, _ = sharded
    report = device_memory(build_eval_step_fn(squares), state, x=batch())
    assert report.resident == bytes_there(state)
    assert report.unused >= report.optimizer_state == bytes_there(state.opt_state)
    assert "does not use: 2.0 KiB" in str(report)
    assert "donate" not in {advice.kind for advice in report.advice}
    assert "kept for the backward pass" not in {group.kind for group in report.temporary_groups}


def test_the_parameters_of_a_plain_function_are_what_its_optimizer_keeps_state_for():
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, opt_state, x):
        gradient = jax.grad(lambda params: jnp.sum(jnp.tanh(x @ params["w"])))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones((64, 64))}
    report = device_memory(step, params, optimizer.init(params), jnp.ones((8, 64)))
    assert (report.parameters, report.optimizer_state) == (64 * 64 * 4, 2 * 64 * 64 * 4 + 4)
    assert report.inputs == 8 * 64 * 4
    (group,) = (group for group in report.groups() if group.part == "parameters")
    assert (group.path, group.optimizer_bytes) == ("params/w", 2 * 64 * 64 * 4)
    (advice,) = report.advice
    assert advice.kind == "donate"
    assert advice.saves == 3 * 64 * 64 * 4
    assert "donate_argnums" in advice.text


def test_what_is_in_the_memory_of_the_host_counts_apart():
    def sharding(kind):
        return NamedSharding(MESH, PartitionSpec("data"), memory_kind=kind)

    @jax.jit
    def step(offloaded, x):
        return jax.device_put(offloaded, sharding("device")).sum() + x.sum()

    offloaded = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding("pinned_host"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding("device"))
    report = device_memory(step, offloaded, x)
    assert (report.host, report.inputs, report.padding) == (64 * 64, 8 * 8, 0)
    assert "in the host's memory, for each device: 4.0 KiB" in str(report)
    assert report.total < report.host
    # Compilers for devices with memory of their own count it apart themselves.
    memory = dataclasses.replace(
        report.program.memory, arguments=8 * 8, host=64 * 64, temporaries=100
    )
    apart = MemoryReport(dataclasses.replace(report.program, memory=memory), report.used)
    assert (apart.host, apart.padding, apart.inputs) == (64 * 64, 0, 8 * 8)


def test_padding_is_what_arguments_take_beyond_their_shards(sharded):
    _, _, report = sharded
    memory = report.program.memory
    padded = dataclasses.replace(memory, arguments=memory.arguments + 4096)
    tiles = MemoryReport(dataclasses.replace(report.program, memory=padded), report.used)
    assert (tiles.padding, tiles.resident) == (4096, report.resident)
    assert tiles.total == report.total + 4096
    assert ("padding", "", "", "4.0 KiB", "") in tiles.table().rows


def test_the_report_is_a_table_in_notebooks_too(sharded):
    _, _, report = sharded
    assert "<table" in report._repr_html_()
    assert "needs " in report._repr_html_()
