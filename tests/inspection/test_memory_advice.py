"""What advice on memory says is saved, against the same step with the advice followed."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    device_memory,
    rematerialise_blocks,
    roll_layer_stacks,
)
from penzai_shard.inspection.memory.memory_advice import memory_advice
from tests.small_train_steps import MESH, build_mlp, report_of


def advised(report, kind):
    (found,) = (advice for advice in report.advice if advice.kind == kind)
    return found


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


def test_advice_that_needs_more_room_for_gradients_than_it_saves_is_not_given():
    # With so few examples the first split costs more than the activations that it saves.
    few = report_of({}, examples=16)
    assert {"microbatches", "shard batch"}.isdisjoint(advice.kind for advice in few.advice)
    assert report_of({}, examples=16, accumulate_steps=2).total > few.total
    assert report_of({"batch": "data"}, examples=16, split="data").total > few.total


def test_advice_for_the_batch_counts_the_microbatches_and_keeps_what_is_split(unwise):
    def with_parts(parts, **changes):
        program = unwise.program
        inputs = {
            name: dataclasses.replace(array, **changes) if array.part == "inputs" else array
            for name, array in program.step.arguments.items()
        }
        step = dataclasses.replace(program.step, microbatches=parts, arguments=inputs)
        program = dataclasses.replace(program, step=step)
        return {a.kind: a for a in memory_advice(program, unwise.temporary_groups, 1)}

    assert "accumulate_steps=8)" in with_parts(4)["microbatches"].text
    # Of 1024 examples each microbatch has 4, then 1.
    assert with_parts(256)["shard batch"].rules == {"batch": "data"}
    assert {"microbatches", "shard batch"}.isdisjoint(with_parts(1024))
    # The batch need not come first, and what is split stays so.
    split = NamedSharding(MESH, PartitionSpec("model"))
    turned = with_parts(1, names=("seq", "batch"), sharding=split)
    assert turned["shard batch"].rules == {"seq": "model", "batch": "data"}
    assert "shard_batch(batch, mesh, {'seq': 'model', 'batch': 'data'})" in (
        turned["shard batch"].text
    )


def test_advice_comes_in_the_order_of_what_it_saves_and_is_shown(unwise):
    saves = [advice.saves for advice in unwise.advice]
    assert saves == sorted(saves, reverse=True)
    assert len(saves) == 5
    assert str(unwise).count("to save ") == 5
    assert len(json.loads(unwise.to_json())["advice"]) == 5


def test_what_saves_less_than_a_hundredth_is_not_advised(unwise):
    least = min(advice.saves for advice in unwise.advice)
    groups = unwise.temporary_groups
    assert least == memory_advice(unwise.program, groups, least * 100)[-1].saves
    assert least < memory_advice(unwise.program, groups, least * 100 + 1)[-1].saves


def test_advice_that_is_followed_already_is_not_given():
    # Every array is split over both mesh axes, and all is donated: a smaller batch is what is left.
    rules = {"batch": "data", "embedding": "data", "neurons": "model"}
    report = report_of(rules, split="data", optimizer=optax.sgd(0.1))
    assert {advice.kind for advice in report.advice} == {"microbatches"}


def test_axes_that_are_taken_or_do_not_divide_are_not_advised():
    report = report_of({"neurons": "model"}, split="data")
    assert advised(report, "shard parameters").rules == {"embedding": "data"}
    # 18 do not divide over 4, nor do the three examples on a device over 2.
    report = report_of(
        {"neurons": "model"},
        build=lambda: build_mlp(embedding=18),
        embedding=18,
        examples=12,
        split="data",
    )
    assert report.advice == ()


def test_arguments_whose_form_no_result_has_left_are_not_advised_to_be_donated():
    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, opt_state):
        return jax.tree.map(lambda moment, w: moment + w, opt_state, (params, params))

    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    report = device_memory(step, params, (params, params))
    assert report.donated == 2 * 64 * 64 * 4
    assert report.advice == ()


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
