"""Memory and traffic of a step unfold layer by layer, and add up to the byte."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
import treescope
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard import build_train_step_fn, collectives, compile_step, device_memory
from tests.small_train_steps import EVERYTHING, MESH, batch, placed_state, squares


@pytest.fixture(scope="module")
def program():
    state = placed_state(EVERYTHING, optax.adam(1e-3))
    step = build_train_step_fn(squares, donate_params_and_state=True)
    return compile_step(step, state, x=batch())


@pytest.fixture(scope="module")
def plain():
    """A function of arrays without layers, which several mesh axes take part in."""
    split = NamedSharding(MESH, PartitionSpec("data", "model"))
    whole = NamedSharding(MESH, PartitionSpec())
    array = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)
    return compile_step(jax.jit(lambda w, x: w @ x, out_shardings=whole), array, array)


def total(tree, name):
    return next((figure.value for figure in tree.figures if figure.name == name), None)


def assert_sums(tree, name, expected):
    """The root and the sum of what is in each node, whatever is folded."""
    assert total(tree, name) == pytest.approx(expected, rel=1e-12)
    assert sum(total(node, name) or 0 for node in tree.children) == pytest.approx(expected)


@pytest.mark.parametrize("collapse", [True, False])
@pytest.mark.parametrize("which", ["program", "plain"])
def test_memory_adds_up_to_the_total_to_the_byte(which, collapse, request):
    report = device_memory(request.getfixturevalue(which))
    tree = report.tree(collapse=collapse)
    assert_sums(tree, "memory", report.total)
    estimated = sum(group.bytes for group in report.temporary_groups)
    assert (total(tree, "temporaries (estimated)") or 0) == estimated


@pytest.mark.parametrize("collapse", [True, False])
@pytest.mark.parametrize("which", ["program", "plain"])
def test_traffic_adds_up_to_what_the_step_sends(which, collapse, request):
    report = collectives(request.getfixturevalue(which))
    assert report.wire_bytes > 0
    assert_sums(report.tree(collapse=collapse), "sent", report.wire_bytes)


@pytest.mark.parametrize("which", ["program", "plain"])
def test_a_program_has_both_on_one_tree(which, request):
    program = request.getfixturevalue(which)
    tree = program.tree()
    assert_sums(tree, "memory", device_memory(program).total)
    assert_sums(tree, "sent", collectives(program).wire_bytes)


def test_each_layer_has_its_parameters_their_state_and_its_traffic(program):
    report, sent = device_memory(program), collectives(program)
    nodes = {}
    for node in program.tree(collapse=False).walk():
        nodes.setdefault(node.path, node)
    parameters = [group for group in report.groups(collapse=False) if group.part == "parameters"]
    assert len(parameters) == 4
    for group in parameters:
        name = group.path.removeprefix("params/")
        assert total(nodes[name], "memory") == group.array_bytes + group.optimizer_bytes
        assert nodes[name].details == (
            "256 B for each such array, and 512 B for the optimizer's state of it",
        )
    for label in ("block_0/up", "block_0/down", "block_1/up", "block_1/down"):
        owned = [
            one.times * one.wire_bytes * part.payload_bytes / one.payload_bytes
            for one in sent.collectives
            for part in one.parts
            if part.labels == (label,)
        ]
        assert sum(owned) > 0
        assert total(nodes[label], "sent") == pytest.approx(sum(owned))
        assert total(nodes[label], "memory") > 0


def test_layers_are_in_the_order_of_the_model(program):
    paths = [node.path for node in program.tree(collapse=False).walk()]
    layers = ["block_0/up", "block_0/down", "block_1/up", "block_1/down"]
    assert [path for path in dict.fromkeys(paths) if path in layers] == layers


def test_below_a_layer_are_kind_mesh_axes_and_phase_of_what_it_sends(program):
    sent = collectives(program)
    items = {node.label for node in sent.tree(collapse=False).walk() if not node.children}
    for one in sent.collectives:
        what = f"{one.kind} over {one.axes_text}, "
        assert any(what in item for item in items)
    assert any(item.endswith(", backward") for item in items)


def test_collectives_that_run_an_unknown_number_of_times_say_so(program):
    report = collectives(program)
    one = dataclasses.replace(report.collectives[0], times=None)
    changed = dataclasses.replace(report, collectives=(one,))
    (leaf,) = [node for node in changed.tree().walk() if not node.children]
    assert "an unknown number of times, each " in leaf.line
    assert total(changed.tree(), "sent") == 0


def test_a_program_shows_itself_layer_by_layer(program):
    text = treescope.render_to_text({"step": program})
    assert "<CompiledProgram: needs " in text
    assert "block_" in text
    assert " sends " in text
    table = program.table(collapse=False)
    assert {"block_0/up", "block_1/down", "inputs", "temporaries"} <= {row[0] for row in table.rows}
    assert str(program).splitlines()[0].startswith("needs ")
    assert "<table" in program._repr_html_()
    data = json.loads(program.to_json())
    assert data["memory"]["total"] == device_memory(program).total
    memory = sum(
        layer["memory"]
        for layer in data["layers"]
        if "/" not in layer["path"] and "memory" in layer
    )
    assert memory == device_memory(program).total


def test_a_step_that_sends_nothing_has_no_traffic():
    alone = compile_step(jnp.dot, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert collectives(alone).tree().children == ()
    assert "sends nothing" in alone.tree().verdict
    assert total(alone.tree(), "sent") is None
    assert total(alone.tree(), "memory") == device_memory(alone).total


def test_no_number_of_bytes_is_shown_without_a_unit(program):
    shown = treescope.render_to_html({"step": program}, compressed=False)
    report = device_memory(program)
    for size in (report.total, report.resident, report.parameters):
        assert str(size) not in shown
        assert f"{size:,}" not in shown


def test_arguments_of_a_function_without_layers_are_nodes_with_memory_and_traffic(plain):
    nodes = {node.path: node for node in plain.tree().walk()}
    arrays = {array.path: array for array in plain.step.arguments.values()}
    assert len(arrays) == 2
    for path, array in arrays.items():
        name = path.removeprefix("inputs/")
        assert total(nodes[name], "memory") == array.bytes_per_device
        owned = sum(
            part.labels == (name,) for one in collectives(plain).collectives for part in one.parts
        )
        assert (total(nodes[name], "sent") is not None) == bool(owned)


def test_what_comes_in_beside_a_model_is_in_a_node_of_its_own(program):
    (inputs,) = (node for node in program.tree().children if node.label == "inputs")
    assert total(inputs, "memory") == device_memory(program).inputs > 0
    assert [node.label for node in inputs.children] == ["x"]
