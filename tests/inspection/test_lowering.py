"""Claims on what is known of a step before it is compiled: arrays, layers, what is refused."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.inspection.layer_marks import Layers
from penzai_shard.inspection.lowering import lower_step
from tests.models import MODELS, LinenBlock, model
from tests.refusals import problem_paths, problems_of, refused

MESH = pzs.make_mesh({"data": 4, "model": 2})
LINEAR = pz.nn.Linear.from_config("l", jax.random.key(0), {"a": 8}, {"b": 8})
LAYER = pz.nn.Sequential([LINEAR, pz.nn.ConstantRescale(by=jnp.ones(()))])
FROZEN = pz.freeze_variables(LAYER)
X = pz.nx.wrap(jnp.ones((4, 8)), "n", "a")
INPUTS = pz.nx.wrap(jnp.ones((2, 8)), "batch", "features")


def struct(*shape, spec=None, mesh=MESH):
    sharding = None if spec is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def lower(step, *args, **kwargs):
    return lower_step(step, args, kwargs, "compile_step")


def parts(arrays):
    return {array.path: array.part for array in arrays}


# Functions and layers


def test_lower_step_of_a_jitted_function_keeps_its_options():
    @functools.partial(jax.jit, static_argnums=(2, 3), donate_argnums=1, keep_unused=True)
    def step(w, x, n, shape, *rest, **more):
        return {"y": (x @ w * n).reshape(shape, -1), "z": rest[0]["a"] + more["k"]}

    w, x = struct(8, 8, spec=P(None, "model")), struct(16, 8, spec=P("data"))
    lowered = lower(step, w, x, 2, np.int64(4), {"a": jnp.ones(3)}, k=1.0, b=jnp.ones(2))
    names = {array.path: array.name for array in lowered.arguments}
    assert [*names] == ["w", "x", "rest/0/a", "more/b", "more/k"]
    assert [*names.values()] == ["w", "x", "rest[0]['a']", "more['b']", "more['k']"]
    assert [array.path for array in lowered.arguments if array.donated] == ["x"]
    assert [array.spec for array in lowered.arguments[:3]] == [P(None, "model"), P("data"), None]
    assert lowered.arguments[1].bytes_per_device == 4 * 8 * 4
    shapes = {array.path: array.shape for array in lowered.results}
    assert shapes == {"result/y": (4, 32), "result/z": (3,)}
    assert lowered.mesh == MESH
    (note,) = lowered.notes
    assert "rest/0/a" in note


STEPS = {
    "layer": (LAYER, ()),
    "Jitted": (pzs.Jitted(LAYER), ()),
    "bound method": (LAYER.__call__, ()),
    "partial": (functools.partial(lambda model, x: model(x), LAYER), ()),
    "function": (lambda model, x: model(x), (LAYER,)),
    "jitted function": (jax.jit(lambda model, x: model(x)), (FROZEN,)),
}


@pytest.mark.parametrize("name", STEPS)
def test_lower_step_names_arrays_and_layers_as_plans_do(name):
    step, args = STEPS[name]
    lowered = lower(step, *args, X)
    by_path = {path.rpartition("/")[2]: part for path, part in parts(lowered.arguments).items()}
    assert (by_path.pop("l.weights"), by_path.pop("by")) == ("parameters", "constants")
    names = {"layer": "argument", "Jitted": "argument", "bound method": "value"}
    assert by_path == {names.get(name, "x"): "inputs"}
    assert [array.names for array in lowered.results] == [("n", "b")]
    owners = {lowered.layers.holders(array.path) for array in lowered.arguments}
    assert owners == {(), ("l",), ("l/constant_rescale",)}


def test_lower_step_of_two_models_with_the_same_labels():
    models = [MODELS["penzai mlp"](seed) for seed in (0, 1)]
    layers = lower(lambda teacher, student, x: teacher(x), *models, INPUTS).layers
    assert "teacher/mlp/Affine_0/Linear" in layers.order
    path = "student/mlp/Affine_0/Linear.weights"
    assert layers.holders(path) == (path.removesuffix(".weights"),)


def test_lower_step_knows_what_is_donated_inside():
    jitted = jax.jit(lambda state, x: 2 * state + x, donate_argnums=0)
    layer = pzs.Jitted(pz.nn.Identity(), donate_argument=True)
    x = jnp.ones(8)
    for step, args in ((lambda state, x: jitted(state, x), (x, x)), (layer, (x,))):
        assert [array.donated for array in lower(step, *args).arguments] == [True, False][
            : len(args)
        ]
    # Equinox gives back a model with functions in it.
    step = eqx.filter_jit(lambda model, x: (model, x + 1), donate="all")
    lowered = lower(step, model("equinox").mlp, x)
    assert all(array.donated for array in lowered.arguments)
    assert len(lowered.next_arguments) == 6
    assert parts(lowered.results)["result/1"] == "outputs"


def test_lower_step_without_marks_says_so():
    @jax.jit
    def step(model, x):
        assert type(model.sublayers[0]) is pz.nn.Linear, "a Linear is wanted"
        return model(x)

    lowered = lower(step, FROZEN, X)
    assert len(lowered.notes) == 1
    assert lowered.layers.holders("model/l.weights") == ("l",)
    assert lowered.layers.owner("jit(step)/jvp(f)/mul") is None


def test_lower_step_finds_the_mesh_that_jax_does():
    explicit = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(explicit, P("data")))
    with jax.set_mesh(explicit):
        lowered = lower(jax.jit(lambda x: jax.sharding.reshard(x, P(None, "data"))), x)
    assert (lowered.mesh, lowered.arguments[0].sharding.mesh) == (MESH, MESH)
    pinned = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("data"))))
    assert lower(pinned, jnp.ones(8)).mesh == MESH
    # JAX writes an empty mesh into the gradient of a change of dtype.
    step = jax.jit(jax.grad(lambda w, x: (w.astype("float32") * x).sum()))
    lowered = lower(step, jnp.ones(8, "bfloat16"), jnp.ones(8))
    assert lowered.mesh is None
    assert lowered.layers.holders("w") == ("w",)


# Steps of other libraries, and by hand


def test_lower_step_of_flax_finds_groups_of_arrays():
    lowered = lower(LinenBlock().apply, model("linen"), jnp.ones((2, 8)))
    layers = lowered.layers
    assert layers.owner("jit(f)/jvp(LinenBlock)/Dense_0/dot_general") == "params/Dense_0"
    # Its running means are another collection.
    assert layers.owner("jit(f)/LinenBlock/BatchNorm_0/mul") == "params/BatchNorm_0"
    assert layers.holders("variables/batch_stats/BatchNorm_0/mean") == ("params/BatchNorm_0",)
    assert parts(lowered.arguments)["variables/batch_stats/BatchNorm_0/mean"] == "state variables"
    for step in (lambda model, x: model(x), nnx.jit(lambda model, x: model(x))):
        lowered = lower(step, model("nnx"), jnp.ones((2, 8)))
        assert parts(lowered.arguments)["model/first/kernel"] == "parameters"
        changed = {lowered.arguments[i].path for i in lowered.next_arguments}
        assert {"model/dropout/rngs/count", "model/norm/mean", "model/norm/var"} <= changed


def mean_of_squares(weights, x):
    return sum(jnp.mean((x @ leaf) ** 2) for leaf in jax.tree.leaves(weights))


def update(weights, state, x):
    gradients = jax.grad(mean_of_squares)(weights, x)
    updates, state = OPTIMIZER.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, jax.tree.map(jnp.linalg.norm, gradients)


OPTIMIZER = optax.chain(optax.clip(1.0), optax.adam(0.1))
WEIGHTS = {"up": {"kernel": jnp.ones((8, 8))}, "down": {"kernel": jnp.ones((8, 8))}}
LABELLED = {"l": pz.ParameterValue(value=jnp.ones((8, 8)), label="l")}
PAIR = WEIGHTS, OPTIMIZER.init(WEIGHTS)
STEPS_BY_HAND = {
    "arguments": (update, PAIR, "weights/up/kernel", ("up",)),
    "a pair": (lambda state, x: update(*state, x), (PAIR,), "state/0/up/kernel", ("0/up",)),
    "Penzai": (update, (LABELLED, OPTIMIZER.init(LABELLED)), "weights/l", ("l",)),
}


@pytest.mark.parametrize("name", STEPS_BY_HAND)
def test_lower_step_pairs_what_an_optimizer_keeps_with_its_parameter(name):
    step, state, path, holders = STEPS_BY_HAND[name]
    lowered = lower(jax.jit(step), *state, jnp.ones((8, 8)))
    *own, x = lowered.arguments
    assert parts(own)[path] == "parameters"
    assert len([array for array in own if array.parameter == path]) == 2
    kept = {lowered.layers.holders(array.path) for array in own if array.parameter == path}
    assert kept == {holders}
    assert dict(lowered.next_arguments) == {number: number for number in range(len(own))}
    assert x.part == "inputs"


def test_lower_step_leaves_it_open_which_of_two_results_is_the_next_value():
    lowered = lower(jax.jit(lambda params: (params, params)), WEIGHTS)
    assert len(lowered.results) == 4
    assert lowered.next_arguments == {}


# Train steps


def loss_fn(model, rng, state, x, scale=1.0):
    return jnp.mean(model(x).unwrap("n", "b") ** 2), state, {"x": x, "scale": scale}


def initial():
    state = pzs.TrainState.initial_state(LAYER, optax.adam(1e-3), jax.random.key(0))
    return jax.device_put(state, pzs.train_state_sharding(state, MESH, {"b": "model"}))


def batch():
    return pzs.shard_batch(X, MESH, {"n": "data"})


MOMENTS = ["opt_state/0/mu/l.weights", "opt_state/0/nu/l.weights"]
STEP = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)


@functools.cache
def lowered_step():
    return lower(STEP, initial(), x=batch())


def test_lower_step_knows_the_arrays_of_a_train_step():
    lowered = lowered_step()
    assert parts(lowered.arguments) == {
        "params/l.weights": "parameters",
        **dict.fromkeys(["opt_state/0/count", *MOMENTS], "optimizer state"),
        **dict.fromkeys(["step", "root_rng"], "state variables"),
        "constants/sublayers/1/by": "constants",
        "inputs/x": "inputs",
    }
    by_path = {array.path: array for array in lowered.arguments}
    weights, moments = by_path["params/l.weights"], by_path[MOMENTS[0]]
    assert (weights.spec, weights.names, weights.donated) == (P(None, "model"), ("a", "b"), True)
    assert (moments.parameter, moments.spec) == ("params/l.weights", P(None, "model"))
    assert lowered.layers.holders(moments.path) == lowered.layers.holders(weights.path) == ("l",)
    nexts = {lowered.arguments[a].path for a in lowered.next_arguments}
    assert nexts == {path for path in parts(lowered.results) if "aux" not in path}
    assert lowered.notes == ()
    operation = "jit(run_step)/gradient/l.weights/sharding_constraint"
    assert (lowered.layers.owner(operation), lowered.layers.phase(operation)) == ("l", "backward")
    # The same of a function around the step.
    around = lower(lambda state, x: STEP(state, x=x), initial(), batch())
    assert around.layers.holders("state/" + moments.path) == ("params/l",)


def test_lower_step_moves_and_deletes_nothing():
    state, x = initial(), X
    shardings = {"x": NamedSharding(MESH, P("data"))}
    step = pzs.build_train_step_fn(loss_fn, input_kwarg_shardings=shardings)
    lowered = lower(step, state, x=x, scale=2.0)
    assert lowered.arguments[-1].spec == P("data")
    # A number of Python gives way to other dtypes, as in the step itself.
    assert [array.path for array in lowered.arguments if array.is_weak] == ["inputs/scale"]
    assert x.data_array.sharding.device_set == {jax.devices()[0]}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert step.programs == {}


def test_lower_step_over_an_explicit_mesh_gives_the_same_program():
    mesh = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
    structs = pzs.make_plan(initial(), mesh, {"b": "model"}).restore_structs()
    lowered = lower(STEP, structs, x=pzs.shard_batch(X, mesh, {"n": "data"}))
    assert lowered.lowered.as_text() == lowered_step().lowered.as_text()
    assert lowered.arguments == lowered_step().arguments


def test_lower_step_of_a_trainer_and_of_its_method():
    trainer = pzs.StatefulTrainer(initial(), loss_fn, mesh=MESH, rules={"b": "model", "n": "data"})
    for step in (trainer, trainer.step):
        lowered = lower(step, x=X)
        assert parts(lowered.arguments) == parts(lowered_step().arguments)
        assert lowered.arguments[-1].spec == P("data")


# What is refused


@pytest.mark.parametrize("step", [dict, 3, jax.jit(jnp.sin).lower(1.0)])
def test_lower_step_refuses_what_is_no_step(step):
    problems = problems_of(pzs.RuleTypeError, lower, step, 1.0)
    assert "compile_step(jax.jit(function)" in problems[0].fix


def test_lower_step_names_all_arrays_that_do_not_fit():
    x, y = struct(6, 8, spec=P("data")), struct(8, 9, spec=P(None, "model"))
    for step in (jax.jit(lambda argument, b, c=0: b), lambda argument, b, c=0: b):
        given = {"argument": {"x": x}, "b": {"y": y}}
        found = refused(pzs.ShardingError, lower, step, **given)
        kinds = {path: problem.kind for path, problem in found.items()}
        assert kinds == {"argument/x": "indivisible", "b/y": "indivisible"}
        lower(step, argument=struct(8), b=1.0)


def test_lower_step_takes_a_state_that_was_donated():
    state = initial()
    jax.tree.map(lambda x: x.delete(), state.trained_arrays)
    lowered = lower(STEP, state, x=batch())
    assert lowered.lowered.as_text() == lowered_step().lowered.as_text()
    lower(jax.jit(lambda state: state), state)
    lower(lambda state: state, state)
    with pytest.raises(pzs.ShardingError):
        STEP(state, x=batch())


def test_lower_step_refuses_traced_arrays_and_what_is_none():
    assert problem_paths(pzs.ShardingError, lower, STEP, initial(), x="text") == ["x"]
    inside = jax.jit(lambda x: lower(jax.jit(lambda y: y), x))
    assert problem_paths(pzs.ShardingError, inside, 1.0) == ["y"]


def test_lower_step_refuses_variables_that_are_in_no_argument():
    counted = MODELS["counted mlp"]()
    before = counted.count.value
    for step in (lambda x: counted(x), jax.jit(lambda x: counted(x))):
        assert problem_paths(pzs.ShardingError, lower, step, INPUTS) == ["count"]
        assert counted.count.value is before
    lower(lambda model, x: model(x), counted, INPUTS)
    assert counted.count.value is before


def test_lower_step_refuses_several_meshes_and_one_without_devices():
    other = pzs.make_mesh({"data": 2}, jax.devices()[:2])
    x, y = (struct(8, spec=P("data"), mesh=mesh) for mesh in (MESH, other))
    assert problem_paths(pzs.MeshError, lower, lambda x, y: x, x, y) == ["y"]
    abstract = NamedSharding(MESH.abstract_mesh, P("data"))
    with pytest.raises(pzs.MeshError):
        lower(jax.jit(lambda x: jax.lax.with_sharding_constraint(x, abstract)), jnp.ones(8))


# Layers

LABELS = {
    "tied llama": "transformer/block_0/attention/query/apply_ro_pe",
    "stacked llama": "transformer/blocks/mlp",
    "counted mlp": "mlp/elementwise",
    "v1 mlp": "Affine_1.Linear",
}


@pytest.mark.parametrize("name", LABELS)
def test_mark_labels_layers_as_plans_name_their_arrays(name):
    layers = Layers()
    assert isinstance(layers.mark(model(name)), type(model(name)))
    assert LABELS[name] in layers.order
    for leaf in pzs.make_plan(model(name), MESH, {}, on_unnamed="infer").leaves:
        label, *others = layers.holders(f"params/{leaf.path}")
        assert label in leaf.path or leaf.path.startswith(("body/", "sublayers/", "count"))
        is_tied = name == "tied llama" and leaf.path.endswith("embeddings")
        assert others == ["transformer/embedding_decode"] * is_tied


def test_a_model_whose_variables_were_taken_out_stands_beside_them():
    slots, parameters = pz.unbind_params(model("penzai mlp"), freeze=True)
    run = jax.jit(lambda slots, parameters, x: pz.bind_variables(slots, parameters)(x))
    x = pz.nx.ones({"features": 8})
    assert pzs.compile_step(run, slots, parameters, x)
    assert pzs.place((slots, parameters), pzs.make_mesh({"data": 8}), {})[0] == slots
