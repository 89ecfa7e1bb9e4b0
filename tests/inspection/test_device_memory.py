"""What ``device_memory`` says a step needs, against arrays that are there and JAX' own figures."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    Jitted,
    TrainState,
    abstract_model,
    build_train_step_fn,
    data_parallel,
    device_memory,
    fully_sharded,
    make_mesh,
    make_plan,
    place,
    rematerialise_blocks,
    roll_layer_stacks,
    shard_batch,
    tensor_parallel,
    train_state_sharding,
)
from penzai_shard.inspection.device_figures import device_figures
from penzai_shard.inspection.memory_report import MemoryReport
from penzai_shard.inspection.programs import CompiledProgram
from penzai_shard.library_apis.compiler_api import ExecutableMemory

MESH = make_mesh({"data": 4, "model": 2})
EVERYTHING = data_parallel() | tensor_parallel() | fully_sharded(min_size=64)


def build_mlp(blocks=2, embedding=16, neurons=32):
    key = jax.random.key(0)
    layers = []
    for i in range(blocks):
        layers += [
            pz.nn.Linear.from_config(
                f"block_{i}/up", key, {"embedding": embedding}, {"neurons": neurons}
            ),
            pz.nn.Elementwise(jnp.tanh),
            pz.nn.Linear.from_config(
                f"block_{i}/down", key, {"neurons": neurons}, {"embedding": embedding}
            ),
        ]
    return pz.nn.Sequential(layers)


def squares(*, model, rng, state, x):
    del rng
    return jnp.mean(model(x).unwrap("batch", "embedding") ** 2), state, {}


def placed_state(rules, optimizer):
    model = place(build_mlp(), MESH, rules)
    return TrainState.initial_state(Jitted(model), optimizer, jax.random.key(0))


def batch(rules=EVERYTHING, mesh=MESH):
    return shard_batch(pz.nx.ones({"batch": 8, "embedding": 16}), mesh, rules)


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
def test_memory_of_devices_that_are_not_there(kind, memory):
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


def test_temporaries_are_not_explained_where_the_estimate_is_far_off(wide):
    memory = dataclasses.replace(wide.program.memory, temporaries=100 * wide.temporaries)
    program = dataclasses.replace(wide.program, memory=memory)
    assert MemoryReport(program, wide.used).temporary_groups == ()


def advised(report, kind):
    (found,) = (advice for advice in report.advice if advice.kind == kind)
    return found


def report_of(
    rules,
    *,
    build=build_mlp,
    edit=lambda model: model,
    donate=True,
    optimizer=None,
    optimizer_rules=None,
    split=None,
    **options,
):
    """The report of a step on abstract arrays; the batch is split as ``split`` says."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    structs = edit(make_plan(abstract_model(build), mesh, rules).restore_structs())
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    state = TrainState.initial_state(structs, optimizer, jax.random.key(0))
    shardings = train_state_sharding(state, mesh, rules, optimizer_rules)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    step = build_train_step_fn(squares, donate_params_and_state=donate, **options)
    x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(split))
        ),
        jax.eval_shape(lambda: pz.nx.ones({"batch": 1024, "embedding": 16})),
    )
    return device_memory(step, state, x=x)


@pytest.fixture(scope="module")
def unwise():
    """A step that donates nothing, shards nothing, and whose batch is whole on every device."""
    return report_of({"batch": "data"}, donate=False)


def test_advice_to_donate_saves_the_outputs(unwise):
    advice = advised(unwise, "donate")
    assert "donate_params_and_state=True" in advice.text
    donated = report_of({"batch": "data"}, donate=True)
    assert advice.saves == donated.donated - 4 == unwise.resident - 16
    assert 0.9 * advice.saves <= unwise.total - donated.total <= advice.saves + 8
    assert "donate" not in {advice.kind for advice in donated.advice}


def test_advice_to_shard_saves_what_it_says_of_what_is_resident(unwise):
    advice = advised(unwise, "shard parameters")
    assert f"add the rule {advice.rules}" in advice.text
    sharded = report_of({"batch": "data", **advice.rules}, donate=False)
    assert unwise.resident - sharded.resident == advice.saves
    assert sharded.total <= unwise.total - advice.saves


def test_advice_to_shard_the_optimizer_state_alone_saves_what_it_says(unwise):
    advice = advised(unwise, "shard optimizer state")
    sharded = report_of({"batch": "data"}, donate=False, optimizer_rules=advice.rules)
    assert unwise.optimizer_state - sharded.optimizer_state == advice.saves
    assert sharded.parameters == unwise.parameters


def test_advice_to_split_the_batch_saves_inputs_and_activations(unwise):
    advice = advised(unwise, "shard batch")
    assert advice.rules == {"batch": "data"}
    split = report_of({"batch": "data"}, donate=False, split="data")
    assert 0.8 * advice.saves <= unwise.total - split.total
    again = advised(split, "shard batch")
    assert again.rules == {"batch": ("data", "model")}
    assert "{'batch': ('data', 'model')}" in again.text


def test_advice_of_microbatches_saves_half_of_what_is_kept(unwise):
    advice = advised(unwise, "microbatches")
    halved = report_of({"batch": "data"}, donate=False, accumulate_steps=2)
    assert 0.8 * advice.saves <= unwise.total - halved.total


def test_advice_comes_in_the_order_of_what_it_saves_and_is_shown(unwise):
    saves = [advice.saves for advice in unwise.advice]
    assert saves == sorted(saves, reverse=True)
    assert len(saves) == 5
    assert str(unwise).count("to save ") == 5
    assert len(json.loads(unwise.to_json())["advice"]) == 5


def test_advice_that_is_followed_already_is_not_given():
    # Every array is split over both mesh axes, and all is donated: a smaller batch is what is left.
    rules = {"batch": "data", "embedding": "data", "neurons": "model"}
    report = report_of(rules, split="data", optimizer=optax.sgd(0.1))
    assert {advice.kind for advice in report.advice} == {"microbatches"}


def test_axes_that_are_taken_or_do_not_divide_are_not_advised():
    report = report_of({"neurons": "model"}, split="data")
    assert advised(report, "shard parameters").rules == {"embedding": "data"}
    rules = {"neurons": ("model", "data")}
    kinds = {advice.kind for advice in report_of(rules, split="data").advice}
    assert kinds == {"microbatches"}


def build_stack():
    def block(init_base_rng):
        up = pz.nn.Linear.from_config("up", init_base_rng, {"embedding": 16}, {"neurons": 64})
        down = pz.nn.Linear.from_config("down", init_base_rng, {"neurons": 64}, {"embedding": 16})
        return pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down])

    return pz.nn.LayerStack.from_sublayer_builder(
        block, "layers", 8, init_base_rng=jax.random.key(0), builder_kwargs={}
    )


def build_blocks():
    return pz.nn.Sequential([pz.nn.Sequential(build_mlp().sublayers[i : i + 3]) for i in (0, 3)])


def test_advice_to_compute_a_stack_again_saves_what_its_layers_keep():
    rules = {"batch": "data"}
    kept = report_of(rules, build=build_stack, edit=roll_layer_stacks().apply, split="data")
    advice = advised(kept, "rematerialise")
    assert 'roll_layer_stacks(policy="carries")' in advice.text
    edit = roll_layer_stacks(policy="carries").apply
    again = report_of(rules, build=build_stack, edit=edit, split="data")
    assert 0.6 * advice.saves <= kept.total - again.total <= 1.1 * advice.saves
    assert "rematerialise" not in {advice.kind for advice in again.advice}
    # Splitting the axis of the layers would have each turn of the loop gather all of them.
    assert "layers" not in advised(kept, "shard parameters").rules


def test_advice_to_compute_blocks_again_names_them_as_edits_do():
    kept = report_of({"batch": "data"}, build=build_blocks, split="data")
    advice = advised(kept, "rematerialise")
    assert "rematerialise_blocks('sublayers/*')" in advice.text
    assert "not that of simulated devices" in advice.text
    edit = rematerialise_blocks("sublayers/*").apply
    again = report_of({"batch": "data"}, build=build_blocks, edit=edit, split="data")
    assert "rematerialise" not in {advice.kind for advice in again.advice}
