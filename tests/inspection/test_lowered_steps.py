"""Steps of every kind, lowered and compiled without running, with every array known."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import Jitted, make_mesh
from penzai_shard.inspection.lowered_steps import lower_step
from penzai_shard.inspection.programs import CompiledProgram, compile_step

P = PartitionSpec


def struct(mesh: Any, *shape: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def parameter_names(program: CompiledProgram) -> list[str]:
    """What the compiled program calls its parameters."""
    entry = program.module.computations[program.module.entry]
    return [i.op_name for i in entry if i.opcode == "parameter"]


@pytest.fixture(scope="module")
def model() -> Any:
    linear = pz.nn.Linear.from_config("l", jax.random.key(0), {"a": 8}, {"b": 8})
    return pz.nn.Sequential([linear, pz.nn.ConstantRescale(by=jnp.ones(()))])


@pytest.fixture(scope="module")
def batch() -> Any:
    return pz.nx.wrap(jnp.ones((4, 8)), "n", "a")


def test_jitted_function_keeps_its_options_and_its_arguments_are_known() -> None:
    mesh = make_mesh(data=4, model=2)

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=1)
    def step(w: Any, x: Any, n: int, *rest: Any, **more: Any) -> Any:
        return {"y": x @ w * n, "z": rest[0]["a"] + more["k"]}

    program = compile_step(
        step,
        struct(mesh, 8, 8, spec=P(None, "model")),
        struct(mesh, 16, 8, spec=P("data")),
        2,
        {"a": jnp.ones(3)},
        k=1.0,
        unused=jnp.ones(2),
    )
    arguments = program.step.arguments
    assert {name: array.path for name, array in arguments.items()} == {
        "w": "w",
        "x": "x",
        "rest[0]['a']": "rest/0/a",
        "more['k']": "more/k",
        "more['unused']": "more/unused",
    }
    assert set(parameter_names(program)) == set(arguments) - {"more['unused']"}
    assert [name for name, array in arguments.items() if array.donated] == ["x"]
    assert (arguments["w"].spec, arguments["x"].spec) == (P(None, "model"), P("data"))
    assert [array.path for array in program.step.results] == ["result/y", "result/z"]
    assert program.step.mesh == mesh


def test_layers_in_arguments_are_marked_and_results_go_by_their_own_paths(
    model: Any, batch: Any
) -> None:
    step = jax.jit(lambda model, x: (model, model(x)))
    program = compile_step(step, pz.freeze_params(model), batch)
    assert set(parameter_names(program)) == set(program.step.arguments)
    assert [(a.path, a.part) for a in program.step.arguments.values()] == [
        ("model/l.weights", "parameters"),
        ("model/sublayers/1/by", "constants"),
        ("x", "inputs"),
    ]
    assert [(a.path, a.part) for a in program.step.results] == [
        ("result/0/l.weights", "parameters"),
        ("result/0/sublayers/1/by", "constants"),
        ("result/1", "outputs"),
    ]
    owners = {p for i in program.module for p in program.step.scopes.paths_in(i.op_name)}
    assert owners == {"sequential", "sublayers/0", "sublayers/1"}


def test_two_models_go_by_their_arguments_names(model: Any, batch: Any) -> None:
    frozen = pz.freeze_params(model)
    step = jax.jit(lambda teacher, student, x: teacher(x) - student(x))
    lowered = lower_step(step, (frozen, frozen, batch), {})
    assert {"teacher/sublayers/0", "student/sublayers/0"} < set(lowered.scopes.paths)


@pytest.mark.parametrize("wrapper", [lambda model: model, Jitted], ids=["layer", "Jitted"])
def test_parameters_of_a_layer_are_arguments_of_its_program(
    wrapper: Any, model: Any, batch: Any
) -> None:
    lowered = lower_step(wrapper(model), (batch,), {})
    parts = {array.path: array.part for array in lowered.arguments.values()}
    assert parts["model/l.weights"] == "parameters"
    assert not lowered.notes


def test_functions_that_take_no_marks_are_lowered_without_and_say_so(
    model: Any, batch: Any
) -> None:
    @jax.jit
    def step(model: Any, x: Any) -> Any:
        assert type(model.sublayers[0]) is pz.nn.Linear, "a Linear is wanted"
        return model(x)

    lowered = lower_step(step, (pz.freeze_params(model), batch), {})
    assert lowered.scopes.paths == []
    (note,) = lowered.notes
    assert "layers could not be marked" in note
    assert "a Linear is wanted" in note


def test_function_that_is_not_compiled_is_put_under_jit_and_says_so(batch: Any) -> None:
    lowered = lower_step(lambda x, train: x * 2 if train == "yes" else x, (batch, "yes"), {})
    assert list(lowered.arguments) == ["x.data_array"]
    assert "jax.jit without options" in lowered.notes[0]
