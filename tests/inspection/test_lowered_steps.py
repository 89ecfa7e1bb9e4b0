"""Steps of every kind, lowered and compiled without running, with every array known."""

import collections
import functools
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    ConstrainShardingByName,
    Jitted,
    Layout,
    StatefulTrainer,
    TrainState,
    abstract_model,
    build_eval_step_fn,
    build_train_step_fn,
    make_mesh,
    make_plan,
    place,
    shard_batch,
    train_state_sharding,
)
from penzai_shard.errors import MeshError, RuleTypeError, ShardingError
from penzai_shard.inspection.program_view import CompiledProgram, compile_step
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.library_apis.compiler_api import kept_arguments
from penzai_shard.library_apis.jax_api import is_weakly_typed
from penzai_shard.training.train_state import is_donated
from penzai_shard.tree_paths import paths_and_leaves
from tests.model_families import transformer

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


RULES = {"b": "model", "n": "data"}


def squared(model: Any, rng: Any, state: Any, x: Any) -> Any:
    out = model(x).untag("n", "b").unwrap()
    return jnp.mean(out**2), state, {"out": out, "x": x}


def build_model() -> Any:
    return pz.nn.Sequential(
        [
            pz.nn.Linear.from_config("l", jax.random.key(0), {"a": 8}, {"b": 16}),
            pz.nn.ConstantRescale(by=jnp.asarray(2.0)),
        ]
    )


def train_state(model: Any) -> TrainState:
    return TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(0))


class Built:
    """A train step, its concrete state and batch on a mesh, and the program."""

    def __init__(self) -> None:
        self.mesh = make_mesh(data=4, model=2)
        self.state = train_state(place(build_model(), self.mesh, RULES))
        self.x = shard_batch(pz.nx.wrap(jnp.ones((8, 8)), "n", "a"), self.mesh, RULES)
        self.step = build_train_step_fn(squared, donate_params_and_state=True)
        self.program = compile_step(self.step, self.state, x=self.x)


@pytest.fixture(scope="module")
def built() -> Built:
    return Built()


def assert_arguments_are_the_program_s(program: CompiledProgram) -> None:
    """Names, number and bytes of the arguments that are kept are those of the program."""
    arguments = program.step.arguments
    kept = kept_arguments(program.step.lowered)
    used = [name for i, name in enumerate(arguments) if i in kept]
    assert sorted(parameter_names(program)) == sorted(used)
    assert sum(arguments[name].bytes_per_device for name in used) == program.memory.arguments


def test_arguments_of_a_train_step_are_those_of_its_program(built: Built) -> None:
    assert_arguments_are_the_program_s(built.program)
    parts = {array.path: array.part for array in built.program.step.arguments.values()}
    assert parts == {
        "step": "state variables",
        "params/l.weights": "parameters",
        "opt_state/0/count": "optimizer state",
        "opt_state/0/mu/l.weights": "optimizer state",
        "opt_state/0/nu/l.weights": "optimizer state",
        "root_rng": "state variables",
        "unbound_model/sublayers/1/by": "constants",
        "inputs/x": "inputs",
    }
    (weights,) = [a for a in built.program.step.arguments.values() if a.part == "parameters"]
    assert (weights.spec, weights.names) == (P(None, "model"), ("a", "b"))


def test_an_abstract_state_gives_the_program_of_the_concrete_one(built: Built) -> None:
    for mesh in (built.mesh, built.mesh.abstract_mesh):
        model = make_plan(abstract_model(build_model), mesh, RULES).restore_structs()
        x = shard_batch(jax.eval_shape(lambda: built.x), mesh, RULES)
        program = lower_step(built.step, (train_state(model),), {"x": x})
        assert [(a.path, a.part, a.spec, a.donated) for a in program.arguments.values()] == [
            (a.path, a.part, a.spec, a.donated) for a in built.program.step.arguments.values()
        ]
        assert program.lowered.as_text() == built.program.step.lowered.as_text()
        assert program.scopes.paths == built.program.step.scopes.paths


def test_donated_arrays_and_layouts_of_results_are_those_of_running(built: Built) -> None:
    state = jax.tree.map(jnp.copy, built.state)
    new, _ = build_train_step_fn(squared, donate_params_and_state=True)(state, x=built.x)
    donated = {
        path
        for path, leaf in zip(paths_of(state), jax.tree.leaves(state), strict=True)
        if leaf.is_deleted()
    }
    arguments = built.program.step.arguments.values()
    assert {array.path for array in arguments if array.donated} == donated != set()
    by_path = {array.path: array for array in built.program.step.results}
    for path, leaf in zip(paths_of(new), jax.tree.leaves(new), strict=True):
        if path in by_path:
            assert by_path[path].sharding == leaf.sharding
            assert by_path[path].shard_shape == leaf.addressable_shards[0].data.shape
    assert [a.path for a in built.program.step.results if a.part == "outputs"] == [
        "aux/out",
        "aux/x",
    ]


def paths_of(state: TrainState) -> list[str]:
    return [path for path, _ in paths_and_leaves(state)]


def test_nothing_is_changed_by_looking(built: Built) -> None:
    step = build_train_step_fn(squared, donate_params_and_state=True)
    state, _ = step(jax.tree.map(jnp.copy, built.state), x=built.x)
    before = dict(state.__dict__)
    lower_step(step, (state,), {"x": built.x})
    # No tree was built, which the next step would have to flatten again.
    assert state.__dict__ == before
    assert not is_donated(state)
    assert len(step._programs) == 1
    step(state, x=built.x)
    assert is_donated(state)
    # What was donated still says what it was.
    arguments = lower_step(step, (state,), {"x": built.x}).arguments.values()
    assert {a.path: a.spec for a in arguments} == {
        a.path: a.spec for a in built.program.step.arguments.values()
    }


def test_evaluation_steps_are_lowered(built: Built) -> None:
    program = compile_step(build_eval_step_fn(squared), built.state, x=built.x)
    assert_arguments_are_the_program_s(program)
    assert not any(array.donated for array in program.step.arguments.values())
    assert [array.path for array in program.step.results] == ["loss", "aux/out", "aux/x"]
    assert "sublayers/0" in program.step.scopes.paths


def test_trainers_are_lowered_with_their_state_and_their_rules(built: Built) -> None:
    trainer = StatefulTrainer(built.state, squared, mesh=built.mesh, rules=RULES)
    trainer.step(x=built.x)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    named = pz.nx.NamedArray.wrap(jnp.ones((8, 8))).tag("n", "a")
    for step in (trainer, trainer.step):
        for given in (named, jax.tree.map(lambda _: x, named)):
            lowered = lower_step(step, (), {"x": given})
            assert donated_paths(lowered) == donated_paths(built.program.step)
            assert lowered.arguments["inputs['x'].data_array"].spec == P("data")
    # Its next step works on the state itself, not on a copy.
    assert not trainer._handed_out


def donated_paths(lowered: LoweredStep) -> list[str]:
    return [array.path for array in lowered.arguments.values() if array.donated]


def test_weights_without_layers_are_lowered_without_marks() -> None:
    def loss(model: Any, rng: Any, state: Any, x: Any) -> Any:
        return jnp.sum(model["w"] * x), state, {}

    state = train_state({"w": jnp.ones(3)})
    lowered = lower_step(build_train_step_fn(loss), (state,), {"x": 2.0})
    assert lowered.mesh is None
    assert lowered.notes == ()
    assert lowered.scopes.paths == []


def test_arrays_without_a_layout_are_counted_and_named(built: Built) -> None:
    state = train_state(jax.eval_shape(lambda: pz.freeze_params(build_model())))
    x = pz.nx.wrap(jnp.ones((8, 8)), "n", "a")
    assert lower_step(built.step, (state,), {"x": x}).notes == ()
    (note,) = lower_step(built.step, (state,), {"x": built.x}).notes
    assert "7 arrays of the state without a layout, such as step" in note
    assert "restore_structs()" in note
    (note,) = lower_step(built.step, (built.state,), {"x": x}).notes
    assert "the layout of arguments that have none: x; " in note
    assert "shard_batch(batch, mesh, rules) decide it" in note
    w = struct(built.mesh, 8, 8, spec=P("data"))
    (note,) = lower_step(jax.jit(lambda w, many, n: w), (w, [jnp.ones(2)] * 5, 1.0), {}).notes
    assert "that have none: many/0, many/1, many/2 and 2 more; " in note


def mean_square(model: Any, rng: Any, state: Any, tokens: Any) -> Any:
    logits = model(tokens).untag("batch", "seq", "vocabulary").unwrap()
    return jnp.mean(logits**2), state, {}


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout.two_dimensional(vocabulary="model", min_size=64, manual=True), (16, 16)),
        (Layout.sequence_parallel(rematerialise="dots"), (16, 16)),
        (Layout.hybrid(min_size=64, reshard_after_forward=True), (4, 16, 4)),
    ],
    ids=["two_dimensional", "sequence_parallel", "hybrid"],
)
def test_layouts_are_built_and_lowered_on_meshes_of_absent_devices(
    layout: Layout, shape: tuple[int, ...]
) -> None:
    names = ("data", "model") if len(shape) == 2 else ("replica", "data", "model")
    mesh = make_mesh(dict(zip(names, shape, strict=True)), abstract=True)
    build = functools.partial(
        transformer,
        "llama",
        num_decoder_blocks=1,
        embedding_dim=32,
        mlp_hidden_dim=64,
        vocab_size=96,
        query_head_multiplier=16,
        projection_dim=8,
    )
    state, step = layout.build(
        build,
        jax.random.key(0),
        mesh=mesh,
        loss_fn=mean_square,
        optimizer=optax.adamw(1e-3),
        rng=jax.random.key(1),
    )
    tokens = jax.eval_shape(lambda: pz.nx.zeros({"batch": 256, "seq": 16}, jnp.int32))
    lowered = lower_step(step, (state,), {"tokens": layout.shard_batch(tokens, mesh)})
    assert lowered.mesh == mesh
    assert lowered.notes == ()
    assert all(isinstance(array.sharding, NamedSharding) for array in lowered.arguments.values())
    specs = {array.path: array.spec for array in lowered.arguments.values()}
    stored = {path: spec for path, spec in specs.items() if path.startswith("params/")}
    assert set(stored.values()) > {P()}
    for path, spec in stored.items():
        assert specs[path.replace("params", "opt_state/0/mu")] == spec


def test_a_layout_builds_the_same_step_where_the_devices_are_absent() -> None:
    layout = Layout(parameters={"b": "model", "a": "data"}, compute={"n": "data"}, blocks=())
    programs = []
    for abstract in (False, True):
        mesh: Any = make_mesh(data=4, model=2)
        mesh = mesh.abstract_mesh if abstract else mesh
        state, step = layout.build(
            build_model,
            mesh=mesh,
            loss_fn=squared,
            optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)),
            rng=jax.random.key(1),
        )
        # Without it, a bfloat16 model would compute in float32.
        assert is_weakly_typed(jax.tree.leaves(state.unbound_model)[0])
        x = shard_batch(plain(), mesh, {"n": "data"})
        programs.append(lower_step(step, (state,), {"x": x}))
    present, absent = programs
    assert absent.lowered.as_text() == present.lowered.as_text()
    assert [(a.path, a.spec, a.donated) for a in absent.arguments.values()] == [
        (a.path, a.spec, a.donated) for a in present.arguments.values()
    ]


def test_declared_layouts_are_those_of_structs_that_have_none(built: Built) -> None:
    declared = train_state_sharding(built.state, built.mesh, RULES, {"a": "data"})
    batch = NamedSharding(built.mesh, P("data"))
    step = build_train_step_fn(
        squared, train_state_shardings=declared, input_kwarg_shardings={"x": batch}
    )
    state = train_state(jax.eval_shape(lambda: pz.freeze_params(build_model())))
    lowered = lower_step(step, (state,), {"x": plain()})
    assert lowered.notes == ()
    specs = {a.path: a.spec for a in lowered.arguments.values()}
    assert specs["params/l.weights"] == P(None, "model")
    assert specs["opt_state/0/mu/l.weights"] == P("data")
    assert specs["inputs/x"] == P("data")
    with pytest.raises(ShardingError, match=r"opt_state/0/mu/l\.weights: has .*'model'.*declared"):
        lower_step(step, (built.state,), {"x": built.x})
    other = shard_batch(plain(), built.mesh, {"n": "model"})
    with pytest.raises(ShardingError, match=r"input x: has .*'model'.* declared .*'data'"):
        lower_step(step, (state,), {"x": other})


# What a newcomer gives, as functions of what was built; the error, and words of its message.
MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "no state": (lambda b: (b.step, (), {"x": b.x}), ShardingError, "TrainState first.*nothing"),
    "a model instead of its state": (
        lambda b: (b.step, (build_model(),), {"x": b.x}),
        ShardingError,
        r"got a Sequential\. Make one: TrainState\.initial_state",
    ),
    "inputs by position": (
        lambda b: (b.step, (b.state, b.x), {}),
        RuleTypeError,
        r"inputs by keyword, and got 1 by position\. Write why\(step, state, x=x, y=y\)",
    ),
    "a trainer's inputs by position": (
        lambda b: (StatefulTrainer(b.state, squared), (b.x,), {}),
        RuleTypeError,
        "inputs by keyword",
    ),
    "no input": (
        lambda b: (b.step, (b.state,), {}),
        RuleTypeError,
        r"the loss function squared:\n  x: is missing\. Give it by keyword",
    ),
    "another input": (
        lambda b: (b.step, (b.state,), {"x": b.x, "y": b.x}),
        RuleTypeError,
        r"y: is not an input of it; its inputs are x\.",
    ),
    "a name for an input that the step has taken": (
        lambda b: (b.step, (b.state,), {"x": b.x, "rng": b.x}),
        ShardingError,
        "inputs cannot be named rng",
    ),
    "text for an input": (
        lambda b: (b.step, (b.state,), {"x": "tokens"}),
        ShardingError,
        r"x: is the str 'tokens', not an array",
    ),
    "a step that is not compiled": (
        lambda b: (build_train_step_fn(squared, jit=False), (b.state,), {"x": b.x}),
        ShardingError,
        "built with jit=False has nothing to lower",
    ),
    "an evaluation that is not compiled": (
        lambda b: (build_eval_step_fn(squared, jit=False), (b.state,), {"x": b.x}),
        ShardingError,
        "built with jit=False has nothing to lower",
    ),
    "a batch on another mesh": (
        lambda b: (b.step, (b.state,), {"x": shard_batch(b.x, make_mesh(data=8), {"n": "data"})}),
        MeshError,
        r"several meshes(.|\n)*step: is on a mesh data=4, model=2(.|\n)*x: is on a mesh data=8",
    ),
    "a batch on an abstract mesh, the state on a present one": (
        lambda b: (
            b.step,
            (b.state,),
            {"x": shard_batch(jax.eval_shape(lambda: b.x), b.mesh.abstract_mesh, RULES)},
        ),
        MeshError,
        "x: is on an abstract mesh data=4, model=2",
    ),
    "a batch on one device": (
        lambda b: (b.step, (b.state,), {"x": jax.device_put(b.x, jax.devices()[3])}),
        MeshError,
        r"x: is on device 3, and others on a mesh data=4, model=2 of the devices 0, 1",
    ),
    "a length that does not divide": (
        lambda b: (jax.jit(lambda x: x), (struct(b.mesh, 3, 6, spec=P(None, "data")),), {}),
        ShardingError,
        r"x: dimension 1 \(6\) of the shape \(3, 6\) does not divide over mesh axis 'data' "
        r"\(4\)\. Pad it to 8",
    ),
    "constraints on a mesh that no argument is on": (
        lambda b: (ConstrainShardingByName(b.mesh.abstract_mesh, {"n": "data"}), (plain(),), {}),
        MeshError,
        "abstract mesh data=4, model=2, and none of its arguments is on it",
    ),
    "a step that was lowered": (
        lambda b: (jax.jit(lambda x: x).lower(1.0), (1.0,), {}),
        RuleTypeError,
        "is a jax.stages.Lowered already",
    ),
    "a step that was called": (
        lambda b: ((b.state, {}), (), {}),
        RuleTypeError,
        r"not a tuple.*step, state, x=x, not what the step gives",
    ),
    "a class": (lambda b: (pz.nn.Linear, (b.x,), {}), RuleTypeError, "Linear is a class"),
    "an optimizer": (
        lambda b: (optax.adam(1e-3), (b.state,), {}),
        RuleTypeError,
        "not a GradientTransformation",
    ),
    "the loss instead of its step": (
        lambda b: (squared, (b.state,), {"x": b.x}),
        RuleTypeError,
        r"build_train_step_fn\(squared\), state",
    ),
    "an argument too few": (
        lambda b: (jax.jit(two), (1.0,), {}),
        RuleTypeError,
        r"not the arguments of two\(x: Any, y: Any\).*missing a required argument: 'y'",
    ),
    "a layer without its input": (
        lambda b: (build_model(), (), {}),
        RuleTypeError,
        "not the arguments of Sequential.*missing a required argument",
    ),
    "variables under jax.jit": (
        lambda b: (jax.jit(two), (build_model(), b.x), {}),
        RuleTypeError,
        r"pz\.freeze_variables\(model\)(.|\n)*x/sublayers/0/weights: is a Parameter",
    ),
    "an option among the arrays": (
        lambda b: (lambda x, train: x if train else -x, (1.0, True), {}),
        jax.errors.TracerBoolConversionError,
        "the value of the argument train",
    ),
}


def test_layers_of_other_libraries_are_lowered_with_their_parameters() -> None:
    attention = equinox.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
    x = jnp.ones((3, 4))
    for step, args in (
        (attention, (x, x, x)),
        (equinox.filter_jit(lambda model, x: model(x, x, x)), (attention, x)),
    ):
        lowered = lower_step(step, args, {})
        assert "query_proj" in lowered.scopes.paths
        paths = [a.path for a in lowered.arguments.values() if a.part == "parameters"]
        assert [path.partition("/")[2] for path in paths] == [
            f"{name}_proj/weight" for name in ("query", "key", "value", "output")
        ]
    dense = linen.Dense(4)
    variables = dense.init(jax.random.key(0), x)
    lowered = lower_step(jax.jit(dense.apply), (variables, x), {})
    assert {a.path: a.part for a in lowered.arguments.values()} == {
        "variables/params/bias": "parameters",
        "variables/params/kernel": "parameters",
        "args/0": "inputs",
    }
    module = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(RuleTypeError, match=r"this Linear is a module.*nnx\.split\(module\)"):
        lower_step(module, (x,), {})
    with pytest.raises(RuleTypeError, match=r"Flax NNX \(JitWrapped\).*nnx\.merge"):
        lower_step(nnx.jit(lambda module, x: module(x)), (module, x), {})
    graph, state = nnx.split(module)
    lowered = lower_step(jax.jit(lambda state, x: nnx.merge(graph, state)(x)), (state, x), {})
    assert {a.part for a in lowered.arguments.values()} == {"parameters", "inputs"}


def test_what_an_optimizer_keeps_in_the_form_of_a_module_is_not_its_parameters() -> None:
    linear = equinox.nn.Linear(4, 4, key=jax.random.key(0))
    moments = optax.adam(1e-3).init(equinox.filter(linear, equinox.is_array))
    lowered = lower_step(jax.jit(lambda model, moments: (model, moments)), (linear, moments), {})
    parts = collections.Counter(a.part for a in lowered.arguments.values())
    assert parts == {"parameters": 2, "optimizer state": 5}


def test_state_variables_of_a_layer_come_out_of_its_program() -> None:
    @pz.pytree_dataclass
    class Counting(pz.nn.Layer):
        count: pz.StateVariable

        def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
            self.count.value = self.count.value + 1
            return argument

    layer = Counting(pz.StateVariable(jnp.zeros((), jnp.int32), label="count"))
    lowered = lower_step(layer, (jnp.ones(3),), {})
    assert [(a.path, a.part) for a in lowered.arguments.values()] == [
        ("model/count", "state variables"),
        ("argument", "inputs"),
    ]
    assert [(a.path, a.part) for a in lowered.results] == [
        ("result", "outputs"),
        ("state_vars/0", "state variables"),
    ]
    assert int(layer.count.value) == 0


def test_what_a_program_holds_that_is_no_argument_is_said() -> None:
    table = jnp.ones((64, 64))
    step = jax.jit(lambda x: x @ table, compiler_options={"xla_cpu_enable_fast_math": True})
    held, options = lower_step(step, (jnp.ones(64),), {}).notes
    assert "closes over 1 array (16.0 KiB), such as float32[64, 64]" in held
    assert "without the function's own compiler_options: xla_cpu_enable_fast_math" in options

    def loss(model: Any, rng: Any, state: Any, x: Any) -> Any:
        return jnp.sum(model["w"] * x @ table), state, {}

    state = train_state({"w": jnp.ones(64)})
    (held,) = lower_step(build_train_step_fn(loss), (state,), {"x": 2.0}).notes
    assert "closes over 1 array" in held


def test_arrays_that_a_function_was_given_before_are_still_described() -> None:
    mesh = make_mesh(data=4, model=2)
    placed = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
    free = jnp.asarray(2.0)
    step = jax.jit(lambda x, n: x * n, donate_argnums=(0, 1))
    before = lower_step(step, (placed, free), {})
    step(placed, free)
    placed.delete(), free.delete()
    after = lower_step(step, (placed, free), {})
    assert after.arguments == before.arguments
    assert after.lowered.as_text() == before.lowered.as_text()
    assert [a.spec for a in after.arguments.values()] == [P("data"), P()]


def test_train_states_in_functions_of_users_go_by_their_fields(built: Built) -> None:
    step = jax.jit(lambda state, x: built.step(state, x=x), donate_argnums=0)
    program = compile_step(step, built.state, built.x)
    own = {a.path: (a.part, a.spec, a.donated) for a in program.step.arguments.values()}
    of_step = built.program.step.arguments.values()
    for array in of_step:
        if array.part in ("parameters", "optimizer state"):
            assert own[f"state/{array.path}"] == (array.part, array.spec, array.donated)
    owners = {p for i in program.module for p in program.step.scopes.paths_in(i.op_name)}
    assert "sublayers/0" in owners
    assert [a.path for a in program.step.results][:2] == [
        "result/0/step",
        "result/0/params/l.weights",
    ]
    # The compiler was to lay them out, and the program says how.
    assert [a.shard_shape for a in program.step.results] == [
        leaf.addressable_shards[0].data.shape
        for leaf in jax.tree.leaves(step(jax.tree.map(jnp.copy, built.state), built.x))
    ]


def test_what_the_compiler_lays_out_is_known_from_the_program() -> None:
    mesh = make_mesh(data=4, model=2)
    step = jax.jit(lambda w, x, y: ((x + y) @ w, jax.random.split(jax.random.key(0), 8)))
    w, x = struct(mesh, 8, 8, spec=P(None, "model")), struct(mesh, 16, 8, spec=P("data"))
    program = compile_step(step, w, x, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    compiled = program.step.lowered.compile()
    for arrays, decided in (
        (program.step.arguments.values(), compiled.input_shardings[0]),
        (program.step.results, jax.tree.leaves(compiled.output_shardings)),
    ):
        assert [a.shard_shape for a in arrays] == [
            layout.shard_shape(a.shape) for a, layout in zip(arrays, decided, strict=True)
        ]
    assert program.step.arguments["y"].sharding is None
    assert program.step.arguments["y"].shard_shape == (4, 8)
    arguments = program.step.arguments.values()
    assert sum(a.bytes_per_device for a in arguments) == program.memory.arguments


def test_functions_on_explicit_meshes_keep_their_types_and_are_reported_on_the_auto_twin() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        w, x = struct(mesh, 8, 8, spec=P(None, "model")), struct(mesh, 16, 8, spec=P("data"))
        for step in (jax.jit(jnp.dot), lambda x, w: jnp.dot(x, w)):
            lowered = lower_step(step, (x, w), {})
            assert lowered.mesh == make_mesh(data=4, model=2)
            (result,) = lowered.results
            assert result.sharding == NamedSharding(lowered.mesh, P("data", "model"))
            assert {a.sharding.mesh for a in lowered.arguments.values()} == {lowered.mesh}


def plain() -> Any:
    return jax.eval_shape(lambda: pz.nx.ones({"n": 8, "a": 8}))


def two(x: Any, y: Any) -> Any:
    return x, y


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_newcomers_are_named_with_a_fix(mistake: str, built: Built) -> None:
    make, error, message = MISTAKES[mistake]
    step, args, kwargs = make(built)
    with pytest.raises(error, match=message) as caught:
        lower_step(step, args, kwargs, called="why(")
    if error is jax.errors.TracerBoolConversionError:
        assert "functools.partial(function, train=True)" in caught.value.__notes__[-1]


def test_a_step_is_not_looked_at_inside_of_a_transformation() -> None:
    def inside(x: Any) -> Any:
        lower_step(jax.jit(two), (x, x), {})

    with pytest.raises(RuleTypeError, match=r"x: is being traced\. Give the array itself"):
        jax.jit(inside)(1.0)


def test_layers_that_pin_activations_on_a_mesh_say_what_it_is(built: Built) -> None:
    layer = ConstrainShardingByName(built.mesh, {"n": "data"})
    lowered = lower_step(layer, (plain(),), {})
    assert lowered.mesh == built.mesh
    (note,) = lowered.notes
    assert "the compiler chose the layout" in note
