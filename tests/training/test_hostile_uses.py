"""Wrong and odd uses of the training functions: each is right, or refused by a clear error."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.layers import ConstrainShardingByName
from penzai_shard.meshes import make_mesh
from penzai_shard.training import (
    StatefulTrainer,
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

MESH = {"data": 4, "model": 2}
RULES = {"in": "data", "batch": "data"}
KEY = jax.random.key(0)


def weights():
    return {"w": pz.nx.wrap(jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "in", "out")}


def loss_fn(model, rng, state, x):
    out = x.unwrap("batch", "in") @ model["w"].unwrap("in", "out")
    return jnp.mean(out**2), state, {"out": out}


def x(mesh=None, spec=None):
    array = pz.nx.wrap(jnp.arange(64.0).reshape(8, 8) / 64, "batch", "in")
    return array if mesh is None else jax.device_put(array, NamedSharding(mesh, spec))


def initial(model=None, optimizer=None, key=KEY, **kwargs):
    optimizer = optax.adam(0.1) if optimizer is None else optimizer
    return TrainState.initial_state(weights() if model is None else model, optimizer, key, **kwargs)


def placed(mesh=None, **kwargs):
    state = initial(**kwargs)
    shardings = train_state_sharding(state, make_mesh(MESH) if mesh is None else mesh, RULES)
    return jax.device_put(state, shardings)


def step(state=None, build=(), **inputs):
    return build_train_step_fn(loss_fn, **dict(build))(
        initial() if state is None else state, **(inputs or {"x": x()})
    )


def loss_with(result):
    """A step whose loss function returns something else than it should."""
    return build_train_step_fn(lambda model, rng, state, x: result(model, state))(initial(), x=x())


def half_mesh(reverse=False):
    devices = jax.devices()[::-1] if reverse else jax.devices()[:4]
    return Mesh(np.asarray(devices), ("data",))


def deleted():
    array = x()
    array.data_array.delete()
    return array


def donated():
    state = initial()
    after, _ = step(state, {"donate_params_and_state": True})
    return state, after


def step_twice_from_one():
    step(donated()[0], {"donate_params_and_state": True})


def constrained_elsewhere():
    layer = ConstrainShardingByName(half_mesh(), {"batch": "data"})

    def constrained(model, rng, state, x):
        return loss_fn(model, rng, state, layer(x))

    build_train_step_fn(constrained)(placed(), x=x())


def pinned_elsewhere():
    layout = NamedSharding(half_mesh(), PartitionSpec("data"))

    def pinned(model, rng, state, x):
        return loss_fn(model, rng, state, jax.lax.with_sharding_constraint(x, layout))

    build_train_step_fn(pinned)(placed(), x=x())


def closure_elsewhere():
    other = jax.device_put(jnp.ones(8), NamedSharding(half_mesh(), PartitionSpec("data")))

    def closed(model, rng, state, x):
        loss, state, aux = loss_fn(model, rng, state, x)
        return loss + other.sum(), state, aux

    return build_train_step_fn(closed)(placed(), x=x())


def needing(**wanted):
    def update(updates, state, params=None, *, batch_statistics):
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


REFUSED = {
    "optimizer by name": (
        lambda: initial(optimizer="adam"),
        "the optimizer is the text 'adam'. Pass the optimizer itself, for instance "
        "optax.adam(1e-3).",
    ),
    "optimizer not called": (
        lambda: initial(optimizer=optax.adamw),
        "the optimizer is the function adamw, which was not called. Write optax.adamw(1e-3).",
    ),
    "a number as optimizer": (lambda: initial(optimizer=1e-3), "the optimizer is a float"),
    "an integer as key": (
        lambda: initial(key=7),
        "root_rng must be a random key, not 7. Write jax.random.key(7).",
    ),
    "no key": (lambda: initial(key=None), "not None. Write jax.random.key(0)"),
    "two keys": (lambda: initial(key=jax.random.split(KEY)), "not an array of key<fry>[2]"),
    "floats as key": (lambda: initial(key=jnp.zeros(2)), "not an array of float32[2]"),
    "text as predicate": (lambda: initial(trainable="w"), "trainable must be a predicate"),
    "text as state of the loss": (
        lambda: initial(loss_fn_state={"note": "abc"}),
        "loss_fn_state/note: is the str 'abc', not an array.",
    ),
    "a model without parameters": (lambda: initial({"name": "abc"}), "it has no parameters"),
    "weights that cannot be trained": (lambda: initial({"n": jnp.arange(3)}), "such as 'n'"),
    "a word for on_unnamed": (lambda: initial(on_unnamed="copy"), "on_unnamed must be 'error'"),
    "a model that was donated": (
        lambda: initial(donated()[0].params),
        "w: is deleted. Use the model of the last state, state.model.",
    ),
    "optimizer of other trees": (
        lambda: initial(optimizer=optax.masked(optax.adam(0.1), {"v": True})),
        "the optimizer masked cannot start from the trainable parameters",
    ),
    "text as loss": (lambda: build_train_step_fn("loss"), "loss_fn must be a function"),
    "no loss": (lambda: build_train_step_fn(None), "loss_fn must be a function"),
    "text as shardings": (
        lambda: step(build={"train_state_shardings": "data"}),
        "train_state_shardings must be a train state of shardings, or one sharding for "
        "everything, not 'data'. Make them: train_state_sharding(state, mesh, rules).",
    ),
    "a dictionary as shardings": (
        lambda: step(build={"train_state_shardings": {"x": 3}}),
        "not {'x': 3}.",
    ),
    "a spec as shardings": (
        lambda: step(build={"train_state_shardings": PartitionSpec("data")}),
        "not P('data',)",
    ),
    "a mesh as shardings": (
        lambda: step(build={"train_state_shardings": make_mesh(MESH)}),
        "must be a train state of shardings",
    ),
    "arrays as shardings": (
        lambda: step(build={"train_state_shardings": initial()}),
        "params/w: a ArrayImpl stands where a sharding should be.",
    ),
    "text as input shardings": (
        lambda: step(build={"input_kwarg_shardings": "data"}),
        "input_kwarg_shardings must map names of inputs to shardings, not 'data'.",
    ),
    "text within input shardings": (
        lambda: step(build={"input_kwarg_shardings": {"x": "data"}}),
        "x: a str stands where a sharding should be.",
    ),
    "text for accumulation": (
        lambda: step(build={"accumulate_steps": "4"}),
        "accumulate_steps must be a positive integer, not '4'.",
    ),
    "a list as batch axis": (
        lambda: step(build={"accumulate_steps": 2, "batch_axis": ["batch"]}),
        "batch_axis must be a logical axis, or for plain arrays the number of a dimension such as "
        "0, not ['batch'].",
    ),
    "an unknown batch axis": (
        lambda: step(build={"accumulate_steps": 2, "batch_axis": "example"}),
        "no input has the logical axis 'example'",
    ),
    "donation without compilation": (
        lambda: step(build={"donate_params_and_state": True, "jit": False}),
        "needs compilation. Pass jit=True, or do not donate.",
    ),
    "a batch in place of the state": (
        lambda: build_train_step_fn(loss_fn)({"x": x()}),
        "a step takes a TrainState first, step(state, **batch), and got a dict.",
    ),
    "a model in place of the state": (
        lambda: build_train_step_fn(loss_fn)(pz.nn.Identity(), x=x()),
        "and got a Identity. Make one: TrainState.initial_state(",
    ),
    "a batch by position": (
        lambda: build_train_step_fn(loss_fn)(initial(), {"x": x()}),
        "a step takes its inputs by keyword, and got 1 by position. Write step(state, **batch).",
    ),
    "arrays by position": (
        lambda: build_train_step_fn(loss_fn)(initial(), x(), x()),
        "got 2 by position. Write step(state, x=x, y=y).",
    ),
    "text as input": (
        lambda: step(x="abc"),
        "x: is the str 'abc', not an array. Pass arrays; give anything else to the loss function "
        "itself, for instance with functools.partial.",
    ),
    "text within an input": (lambda: step(x={"a": x(), "b": ["c"]}), "x/b/0: is the str 'c'"),
    "an object as input": (lambda: step(x=object()), "x: is the object <object"),
    "words as input": (lambda: step(x=np.asarray(["a", "b"])), "x: is"),
    "Python objects as input": (lambda: step(x=np.asarray([None, {}])), "x: is"),
    "a parameter as input": (
        lambda: step(x=pz.Parameter(value=x(), label="x")),
        "not an array. Pass arrays",
    ),
    "an input too many": (lambda: step(x=x(), y=x()), "cannot be called with the keywords"),
    "an input too few": (lambda: step(y=x()), "cannot be called with the keywords"),
    "an input called rng": (lambda: step(x=x(), rng=KEY), "inputs cannot be named rng"),
    "an abstract input": (
        lambda: step(x=jax.eval_shape(x)),
        "x: it is abstract, a ShapeDtypeStruct. Pass an array.",
    ),
    "a deleted input": (lambda: step(x=deleted()), "x: its memory is gone"),
    "a batch on a part of the devices": (
        lambda: step(placed(), x=x(half_mesh(), PartitionSpec("data"))),
        "input x: is on P('data',) on mesh data=4 (devices 0, 1, 2, 3), the train state on P() "
        "on mesh data=4, model=2 (devices 0, 1, 2, 3, 4, 5, 6, 7). Place it with the state: "
        "shard_batch(batch, mesh, rules), with the state's mesh.",
    ),
    "a batch on one device": (
        lambda: step(placed(), x=jax.device_put(x(), jax.devices()[3])),
        "input x: is on device 3, the train state on P() on mesh data=4, model=2",
    ),
    "a state on a part of the devices": (
        lambda: step(placed(half_mesh()), x=x(make_mesh(MESH), PartitionSpec("data"))),
        "input x: is on P('data',) on mesh data=4, model=2",
    ),
    "a constraint layer on other devices": (constrained_elsewhere, "devices"),
    "a constraint on other devices": (
        pinned_elsewhere,
        "the loss function uses arrays or constraints on other devices than the train state, "
        "which is on P() on mesh data=4, model=2",
    ),
    "a state that was donated": (
        step_twice_from_one,
        "this train state was donated to the step from 0 to 1, which reused its memory. Keep the "
        "state that the step returned: state, aux = step(state, ...). To go on from this one too, "
        "copy it before the step, jax.tree.map(jnp.copy, state), or build the step with "
        "donate_params_and_state=False.",
    ),
    "the model of a donated state": (lambda: donated()[0].model, "was donated to the step from 0"),
    "a state of text": (
        lambda: step(dataclasses.replace(initial(), step="7")),
        "step: is of type str. Fill it with an array.",
    ),
    "a state without its parameters": (
        lambda: step(dataclasses.replace(initial(), params={})),
        "w: went missing. Put its value back.",
    ),
    "a state of other parameters": (
        lambda: step(dataclasses.replace(initial(), params=weights() | {"v": jnp.ones(2)})),
        "v: is not in the model.",
    ),
    "a state without its state variables": (
        lambda: step(
            dataclasses.replace(
                initial(
                    {
                        "w": pz.Parameter(value=weights()["w"], label="w"),
                        "s": pz.StateVariable(value=jnp.zeros(2), label="s"),
                    }
                ),
                state_vars={},
            )
        ),
        "s: went missing. Put its value back.",
    ),
    "a state with a number for its key": (
        lambda: step(dataclasses.replace(initial(), root_rng=3)),
        "root_rng must be a random key, not 3. Write jax.random.key(3).",
    ),
    "no state": (lambda: build_train_step_fn(loss_fn)(), "and got nothing"),
    "the state by keyword": (
        lambda: build_train_step_fn(loss_fn)(train_state=initial(), x=x()),
        "a step takes a TrainState first, step(state, **batch), and got nothing.",
    ),
    "a dictionary to lower": (
        lambda: build_train_step_fn(loss_fn).lower({"x": 1}),
        "and got a dict",
    ),
    "a sharding of too many dimensions": (
        lambda: step(
            placed(),
            {"train_state_shardings": NamedSharding(make_mesh(MESH), PartitionSpec("data"))},
        ),
        "step: has P() on mesh data=4, model=2, declared P('data',) on mesh data=4, model=2.",
    ),
    "an input sharding of too many dimensions": (
        lambda: step(
            placed(),
            {
                "input_kwarg_shardings": {
                    "x": NamedSharding(make_mesh(MESH), PartitionSpec(None, None, "data"))
                }
            },
        ),
        "input x: P(None, None, 'data') on mesh data=4, model=2 does not fit it",
    ),
    "outputs on other devices": (
        lambda: step(
            placed(),
            {"aux_output_shardings": NamedSharding(half_mesh(), PartitionSpec())},
        ),
        "devices",
    ),
    "a batch by position for a trainer": (
        lambda: StatefulTrainer(initial(), loss_fn).step({"x": x()}),
        "got 1 by position. Write trainer.step(**batch).",
    ),
    "a loss of text": (
        lambda: loss_with(lambda model, state: ("abc", state, {})),
        "the loss is a str, not an array; it must be a floating scalar.",
    ),
    "a loss of None": (lambda: loss_with(lambda model, state: (None, state, {})), "NoneType"),
    "no result": (lambda: loss_with(lambda model, state: None), "returned a NoneType"),
    "a complex loss": (
        lambda: loss_with(lambda model, state: (jnp.complex64(1), state, {})),
        "it must be a floating scalar",
    ),
    "a text as new state": (
        lambda: loss_with(lambda model, state: (jnp.float32(1), {"a": "b"}, {})),
        "new_state/a: is the str 'b'",
    ),
    "a text among the outputs": (
        lambda: loss_with(lambda model, state: (jnp.float32(1), state, {"a": "b"})),
        "aux/a: is the str 'b'",
    ),
    "a model among the outputs": (
        lambda: loss_with(lambda model, state: (jnp.float32(1), state, pz.StateVariable(1.0))),
        "of a variable return its .value",
    ),
    "an optimizer that asks for more": (
        lambda: step(initial(optimizer=needing())),
        "asks for 'batch_statistics', which a train step does not have",
    ),
    "an optimizer whose state grows": (
        lambda: step(
            initial(optimizer=optax.chain(optax.sgd(0.1), optax.monitor({"size": optax.tree.norm})))
        ),
        "opt_state/1/measurements/size: was not there before. Use an optimizer whose update keeps "
        "the form that its init made.",
    ),
    "an optimizer that changes a shape": (
        lambda: build_train_step_fn(lambda model, rng, state: (model["w"] * 1.0, state, None))(
            initial({"w": jnp.float32(1)}, optax.stateless(lambda u, p: {"w": u["w"][None]}))
        ),
        "params/w: was float32 of shape (), became float32 of shape (1,).",
    ),
    "shardings of another model": (
        lambda: step(
            build={
                "train_state_shardings": train_state_sharding(
                    initial({"v": weights()["w"]}), make_mesh(MESH), RULES
                )
            }
        ),
        "train_state_shardings are not shaped like this train state",
    ),
    "shardings of an optimizer of another form": (
        lambda: step(
            build={
                "train_state_shardings": train_state_sharding(
                    initial(optimizer=optax.sgd(0.1, 0.9)), make_mesh(MESH), RULES
                )
            }
        ),
        "opt_state: ",
    ),
    "nothing to lower": (
        lambda: build_train_step_fn(loss_fn, jit=False).lower(initial(), x=x()),
        "has nothing to lower",
    ),
    "shardings of a dictionary": (
        lambda: train_state_sharding(weights(), make_mesh(MESH), RULES),
        "train_state_sharding takes a TrainState, not a dict.",
    ),
    "rules under two names": (
        lambda: train_state_sharding(
            initial(), make_mesh(MESH), RULES, axis_name_to_mesh_name=RULES
        ),
        "rules and axis_name_to_mesh_name are two names of one argument",
    ),
    "a trainer of a model": (
        lambda: StatefulTrainer(weights(), loss_fn),
        "a StatefulTrainer takes a TrainState, not a dict. For a model: StatefulTrainer.build(",
    ),
    "a trainer's rules without a mesh": (
        lambda: StatefulTrainer(initial(), loss_fn, rules=RULES),
        "rules need a mesh",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name(name):
    use, message = REFUSED[name]
    with pytest.raises(ShardingError) as caught:
        use()
    assert message in str(caught.value)
    assert not re.search(r"\b(step|rest|packed|arrays)\[", str(caught.value))


EXPECTED = {}


def expected():
    """The parameters after one step on one device."""
    if not EXPECTED:
        state, _ = step()
        EXPECTED["w"] = np.asarray(state.params["w"].data_array)
    return EXPECTED["w"]


def of_numpy(array):
    return jax.tree.map(np.asarray, array)


def explicit(sizes):
    kinds = (jax.sharding.AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


class CallableLoss:
    def __call__(self, *, model, rng, state, x):
        return loss_fn(model, rng, state, x)


def copied_before_donation():
    state = initial()
    build = {"donate_params_and_state": True}
    step(jax.tree.map(jnp.copy, state), build)
    return step(state, build)


RIGHT = {
    "NumPy input": lambda: step(x=of_numpy(x())),
    "NumPy state": lambda: step(
        jax.tree.map(lambda a: a if a.dtype == KEY.dtype else of_numpy(a), initial())
    ),
    "a key of jax.random.PRNGKey": lambda: step(initial(key=jax.random.PRNGKey(0))),
    "an Explicit mesh": lambda: step(
        placed(explicit(MESH)), x=x(explicit(MESH), PartitionSpec("data"))
    ),
    "an Explicit batch": lambda: step(placed(), x=x(explicit(MESH), PartitionSpec("data"))),
    "a batch on a mesh of another form": lambda: step(
        placed(), x=x(make_mesh({"all": 8}), PartitionSpec("all"))
    ),
    "only the batch on a mesh": lambda: step(x=x(make_mesh(MESH), PartitionSpec("data"))),
    "a batch split over a free axis": lambda: step(
        placed(), x=x(make_mesh(MESH), PartitionSpec(("data", "model")))
    ),
    "a batch by shard_batch": lambda: step(
        placed(), **shard_batch({"x": x()}, make_mesh(MESH), {"batch": "data"})
    ),
    "None among the inputs": lambda: build_train_step_fn(
        lambda model, rng, state, x, mask: loss_fn(model, rng, state, x)
    )(initial(), x=x(), mask=None),
    "containers and numbers among the inputs": lambda: build_train_step_fn(
        lambda model, rng, state, x, more: loss_fn(model, rng, state, more["a"][0] * more["b"])
    )(initial(), x=x(), more={"a": [x()], "b": 1.0}),
    "a partial loss": lambda: build_train_step_fn(
        functools.partial(
            lambda model, rng, state, x, kind: loss_fn(model, rng, state, x), kind="a"
        )
    )(initial(), x=x()),
    "an object as loss": lambda: build_train_step_fn(CallableLoss())(initial(), x=x()),
    "a compiled loss": lambda: build_train_step_fn(jax.jit(loss_fn))(initial(), x=x()),
    "functions in the model": lambda: build_train_step_fn(
        lambda model, rng, state, x: loss_fn({"w": model["act"](model["w"])}, rng, state, x)
    )(initial(weights() | {"act": lambda value: value, "name": "abc"}), x=x()),
    "one sharding for everything": lambda: step(
        jax.device_put(initial(), NamedSharding(make_mesh(MESH), PartitionSpec())),
        {"train_state_shardings": NamedSharding(make_mesh(MESH), PartitionSpec())},
    ),
    "shardings of an equal optimizer": lambda: step(
        placed(), {"train_state_shardings": train_state_sharding(initial(), make_mesh(MESH), RULES)}
    ),
    "shardings of another rate": lambda: step(
        placed(),
        {
            "train_state_shardings": train_state_sharding(
                initial(optimizer=optax.adam(0.5)), make_mesh(MESH), RULES
            )
        },
    ),
    "some shardings": lambda: step(
        placed(),
        {
            "train_state_shardings": dataclasses.replace(
                train_state_sharding(initial(), make_mesh(MESH), RULES), opt_state=None
            )
        },
    ),
    "a state after jax.tree.map": lambda: step(jax.tree.map(lambda leaf: leaf, initial())),
    "a state out of jax.jit": lambda: step(jax.jit(lambda state: state)(initial())),
    "a copy of a donated state": copied_before_donation,
    "within jax.jit": lambda: jax.jit(build_train_step_fn(loss_fn))(initial(), x=x()),
    "without compilation": lambda: step(build={"jit": False}),
    "an array of the loss on other devices": closure_elsewhere,
    "no donation": lambda: step(build={"donate_params_and_state": False}),
    "in parts": lambda: step(build={"accumulate_steps": 4, "aux_reduction": {"out": "last"}}),
}


@pytest.mark.parametrize("name", list(RIGHT))
def test_right(name):
    state, _ = RIGHT[name]()
    np.testing.assert_allclose(state.params["w"].data_array, expected(), rtol=1e-5, atol=1e-6)
    assert int(state.step) == 1


def test_a_loss_function_s_own_error_is_left_alone():
    def broken(model, rng, state, x):
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        build_train_step_fn(broken)(initial(), x=x())


def test_a_predicate_s_own_error_names_the_parameter():
    with pytest.raises(ZeroDivisionError) as caught:
        initial(trainable=lambda parameter: 1 / 0)
    assert caught.value.__notes__ == [
        "This was raised while trainable= was asked about the parameter 'w'."
    ]


def test_a_donated_state_says_so_when_shown():
    state, after = donated()
    for shown in (repr(state), str(state)):
        assert shown.startswith("TrainState(donated: this train state was donated to the step from")
        assert "state, aux = step(state, ...)" in shown
    assert repr(after) == (
        "TrainState(step=1, VariableTable(1 trainable, 0 frozen, 0 state variables))"
    )
    again, _ = step(after, {"donate_params_and_state": True})
    assert "donated to the step from 1 to 2" in repr(after)
    assert int(after.step) == 1
    assert int(again.step) == 2


def test_a_step_that_fails_while_it_runs_is_not_said_to_be_donated():
    def fails(model, rng, state, x):
        def check(value):
            raise RuntimeError("of the host")

        value = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
        loss, state, _ = loss_fn(model, rng, state, x)
        return loss, state, {"value": value}

    run = build_train_step_fn(fails, donate_params_and_state=True)
    with pytest.raises(Exception, match="of the host") as caught:
        jax.block_until_ready(jax.tree.leaves(run(initial(), x=x())))
    assert "donated to" not in str(caught.value)


def test_a_failed_step_takes_nothing():
    run = build_train_step_fn(loss_fn, donate_params_and_state=True)
    state, _ = run(initial(), x=x())
    for wrong in ("abc", jax.eval_shape(x), deleted()):
        with pytest.raises(ShardingError):
            run(state, x=wrong)
    state, _ = run(state, x=x())
    assert int(state.step) == 2


def test_errors_about_arguments_are_type_errors_too():
    with pytest.raises(TypeError):
        initial(optimizer="adam")
    with pytest.raises(RuleTypeError):
        step(build={"train_state_shardings": "data"})
