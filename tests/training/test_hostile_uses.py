"""Wrong and odd uses of training: each is right, or is refused by path with a clear error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard import MeshError, RuleTypeError, ShardingError
from tests.models import linen_state  # noqa: F401 - named in a call

MESH = pzs.make_mesh({"data": 4, "model": 2})
WHOLE = NamedSharding(MESH, P())
HALVES = NamedSharding(Mesh(np.asarray(jax.devices()[:4]), ("data",)), P())
KEY = jax.random.key(0)


def weights(**others):
    return {"w": pz.nx.wrap(jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "in", "out"), **others}


def x(sharding=None):
    array = pz.nx.wrap(jnp.arange(64.0).reshape(8, 8) / 64, "batch", "in")
    return array if sharding is None else jax.device_put(array, sharding)


def loss_fn(model, rng, state, x):
    out = x.unwrap("batch", "in") @ model["w"].unwrap("in", "out")
    return jnp.mean(out**2), state, {"out": out}


def initial(model=None, optimizer=None, key=KEY, **options):
    model = weights() if model is None else model
    return pzs.TrainState.initial_state(model, optimizer or optax.adam(0.1), key, **options)


def layout(state, rules=None):
    return pzs.train_state_sharding(state, MESH, {"in": "data"} if rules is None else rules)


def placed():
    return jax.device_put(initial(), layout(initial()))


build = functools.partial(pzs.build_train_step_fn, loss_fn)


def run(state=None, array=None, **options):
    state = initial() if state is None else state
    return build(**options)(state, x=x() if array is None else array)


def with_loss(loss, **options):
    """A step whose loss function gives or does something else."""

    def changed(model, rng, state, x):
        return loss(model, state, loss_fn(model, rng, state, x)[0])

    return pzs.build_train_step_fn(changed, **options)(initial(), x=x())


def deleted():
    array = x()
    array.data_array.delete()
    return array


def donated():
    state = initial()
    run(state, donate_params_and_state=True)
    return state


def optimizer(state, update):
    return optax.GradientTransformation(lambda params: state, update)


# Name: error, path of one offender; the call, as a text.
# fmt: off
REFUSED = {
    # What a state is made of
    "optimizer by name": (RuleTypeError, "optimizer_def", "initial(optimizer='adam')"),
    "optimizer not called": (RuleTypeError, "optimizer_def", "initial(optimizer=optax.adam)"),
    "integer as key": (RuleTypeError, "root_rng", "initial(key=7)"),
    "text as predicate": (RuleTypeError, "trainable", "initial(trainable='w')"),
    "text in the loss's state": (
        ShardingError, "loss_fn_state/a", "initial(loss_fn_state={'a': 'b'})"),
    "nothing trained": (ShardingError, "", "initial({'n': jnp.arange(3)})"),
    "state of Flax": (ShardingError, "opt_state/0/nu/Dense_1/kernel", "initial(linen_state())"),
    "state of ours": (ShardingError, "opt_state/0/nu/w", "initial(initial())"),
    "deleted model": (ShardingError, "w", "initial({'w': deleted()})"),
    "two of one path": (
        ShardingError, "a/b", "initial({'a/b': jnp.ones(2), 'a': {'b': jnp.ones(2)}})"),
    "two meshes": (MeshError, "params/w", "initial({'a': x(HALVES), 'w': x(WHOLE)})"),
    # What a step is made of
    "text as loss": (RuleTypeError, "loss_fn", "pzs.build_train_step_fn('loss')"),
    "text for microbatches": (RuleTypeError, "accumulate_steps", "build(accumulate_steps='4')"),
    "unknown metric": (RuleTypeError, "step_metrics", "build(step_metrics='accuracy')"),
    "donation without jit": (
        RuleTypeError, "donate_params_and_state", "build(donate_params_and_state=True, jit=False)"),
    "spec as layout": (
        RuleTypeError, "train_state_shardings", "build(train_state_shardings=P('data'))"),
    "arrays as layout": (RuleTypeError, "params/w", "build(train_state_shardings=initial())"),
    "layout of too many dimensions": (
        ShardingError, "x",
        "run(input_kwarg_shardings={'x': NamedSharding(MESH, P(None, None, 'data'))})"),
    "layout of another state": (
        ShardingError, "params/v", "run(train_state_shardings=layout(initial({'v': x()})))"),
    "state that lies otherwise": (
        ShardingError, "params/w", "run(placed(), train_state_shardings=layout(initial(), {}))"),
    "layout of a dictionary": (RuleTypeError, "train_state", "layout(weights())"),
    # What a step is called with
    "batch for the state": (RuleTypeError, "train_state", "build()({'x': x()})"),
    "nothing": (RuleTypeError, "train_state", "build()()"),
    "donated state": (ShardingError, "params/w", "run(donated())"),
    "donated model": (ShardingError, "w", "initial(donated().params)"),
    "state of shapes": (ShardingError, "params/w", "run(jax.eval_shape(initial))"),
    "state of shardings": (ShardingError, "params/w", "run(layout(initial()))"),
    "text as input": (ShardingError, "x", "build()(initial(), x='abc')"),
    "text within an input": (
        ShardingError, "x/b/0", "build()(initial(), x={'a': x(), 'b': ['c']})"),
    "variable as input": (
        ShardingError, "", "build()(initial(), x=pz.Parameter(value=x(), label='x'))"),
    "deleted input": (ShardingError, "x", "build()(initial(), x=deleted())"),
    "input too many": (ShardingError, "", "build()(initial(), x=x(), y=x())"),
    "input called rng": (ShardingError, "rng", "build()(initial(), x=x(), rng=KEY)"),
    "batch on half of the devices": (MeshError, "x", "build()(placed(), x=x(HALVES))"),
    "batch on one device": (MeshError, "x", "build()(placed(), x=x(jax.devices()[3]))"),
    "batch that does not divide": (ShardingError, "x", "run(accumulate_steps=3)"),
    "nothing to lower": (RuleTypeError, "jit", "build(jit=False).lower(initial(), x=x())"),
    # What a loss function gives and does
    "no scalar": (ShardingError, "", "with_loss(lambda m, s, loss: (jnp.ones(3), s, {}))"),
    "named loss": (ShardingError, "", "with_loss(lambda m, s, loss: (m['w'], s, {}))"),
    "no result": (ShardingError, "", "with_loss(lambda m, s, loss: None)"),
    "text among outputs": (
        ShardingError, "aux/a", "with_loss(lambda m, s, loss: (loss, s, {'a': 'b'}))"),
    "variable among outputs": (
        ShardingError, "", "with_loss(lambda m, s, loss: (loss, s, pz.StateVariable(1.0)))"),
    "new state grows": (
        ShardingError, "loss_fn_state/n", "with_loss(lambda m, s, loss: (loss, {'n': 1}, {}))"),
    "assigned parameter": (
        ShardingError, "w",
        "with_loss(lambda m, s, loss: m.update(w=m['w'] * 2) or (loss, s, {}))"),
    "new parameter": (
        ShardingError, "w",
        "with_loss(lambda m, s, loss: m.update(v=jnp.ones(2)) or (loss, s, {}))"),
    "metric of no dictionary": (
        ShardingError, "aux",
        "with_loss(lambda m, s, loss: (loss, s, [loss]), step_metrics='loss')"),
    # What an optimizer gives
    "statistic that grows": (
        ShardingError, "opt_state",
        "run(initial(optimizer=optimizer(jnp.ones(2), lambda u, s, p: (u, jnp.ones(3)))))"),
    "update of another shape": (
        ShardingError, "params/w",
        "run(initial(optimizer=optimizer((), lambda u, s, p: ({'w': u['w'][None]}, s))))"),
    # A trainer
    "trainer of a model": (
        RuleTypeError, "train_state", "pzs.StatefulTrainer(weights(), loss_fn, mesh=MESH)"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    error, path, call = REFUSED[name]
    with pytest.raises(error) as caught:
        eval(call)
    assert path in [problem.path for problem in caught.value.problems]
    assert all(problem.fix for problem in caught.value.problems)


@functools.cache
def expected():
    return np.asarray(run()[0].params["w"].data_array)


class Loss:
    def __call__(self, *, model, rng, state, x):
        return loss_fn(model, rng, state, x)


def as_numpy(tree):
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == KEY.dtype else np.asarray(leaf), tree)


RIGHT = {
    "NumPy": lambda: run(as_numpy(initial()), as_numpy(x())),
    "key of PRNGKey": lambda: run(initial(key=jax.random.PRNGKey(0))),
    "batch over both mesh axes": lambda: run(
        placed(), x(NamedSharding(MESH, P(("data", "model"))))
    ),
    "None and numbers": lambda: pzs.build_train_step_fn(
        lambda model, rng, state, x, more: loss_fn(model, rng, state, x[0] * more["b"])
    )(initial(), x=[x()], more={"a": None, "b": 1.0}),
    "partial": lambda: pzs.build_train_step_fn(
        functools.partial(lambda kind, **given: loss_fn(**given), "kind")
    )(initial(), x=x()),
    "object": lambda: pzs.build_train_step_fn(Loss())(initial(), x=x()),
    "compiled loss": lambda: pzs.build_train_step_fn(jax.jit(loss_fn))(initial(), x=x()),
    "functions in the model": lambda: run(initial(weights(act=jax.nn.relu, name="abc"))),
    "one sharding for all": lambda: run(
        jax.device_put(initial(), WHOLE), train_state_shardings=WHOLE
    ),
    "layout of another rate": lambda: run(
        placed(), train_state_shardings=layout(initial(optimizer=optax.adam(0.5)))
    ),
    "copy before donation": lambda: [
        run(jax.tree.map(jnp.copy, state := initial()), donate_params_and_state=True),
        run(state, donate_params_and_state=True),
    ][1],
    "out of jit": lambda: run(jax.jit(lambda: initial())()),
    "scalar with names": lambda: with_loss(lambda m, s, loss: (pz.nx.wrap(loss), s, {})),
    "single device": lambda: run(jax.device_put(initial(), jax.devices()[3])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    state, _ = RIGHT[name]()
    np.testing.assert_allclose(state.params["w"].data_array, expected(), rtol=1e-5, atol=1e-6)
    assert int(state.step) == 1


# After a failure


class UserError(Exception):
    pass


def test_errors_of_the_user_pass_through_unchanged():
    calls = []

    def failing(model, rng, state, x):
        calls.append(x)
        raise UserError("of the user")

    with pytest.raises(UserError, match="of the user") as caught:
        pzs.build_train_step_fn(failing)(initial(), x=x())
    assert len(calls) == 1
    assert caught.value.__cause__ is None


def test_assignment_to_a_parameter_of_penzai_is_an_error_of_python():
    def assigning(model, rng, state, x):
        model.value = model.value * 2
        return jnp.sum(x), state, {}

    state = initial(pz.Parameter(value=jnp.ones(2), label="w"))
    with pytest.raises(AttributeError):
        pzs.build_train_step_fn(assigning)(state, x=jnp.ones(2))


def test_a_failed_step_takes_nothing():
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    state, _ = step(initial(), x=x())
    # An array without names fails in the loss function itself.
    for value in ("abc", jax.eval_shape(x), deleted(), jnp.ones(3)):
        with pytest.raises(AttributeError if isinstance(value, jax.Array) else ShardingError):
            step(state, x=value)
    with pytest.raises(ShardingError):
        step(state, x=x(), y=x())
    state, _ = step(state, x=x())
    assert int(state.step) == 2


def test_a_batch_elsewhere_after_the_first_step():
    step = pzs.build_train_step_fn(loss_fn)
    state, _ = step(placed(), x=x())
    with pytest.raises(MeshError) as caught:
        step(state, x=x(jax.devices()[3]))
    assert [problem.path for problem in caught.value.problems] == ["x"]


def test_what_is_not_a_number_goes_on():
    state, aux = run(None, x() * jnp.nan, step_metrics=["loss", "gradient_norm"])
    assert np.isnan(aux["loss"])
    assert np.isnan(aux["gradient_norm"])
    assert np.all(np.isnan(state.params["w"].data_array))
