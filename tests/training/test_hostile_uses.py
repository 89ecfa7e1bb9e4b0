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
from penzai_shard import MeshError, PlanError, RuleTypeError, ShardingError
from tests.models import MODELS
from tests.training import losses
from tests.training.losses import KEY, W, X, batch, initial, layout, loss_fn, paths_of

MESH = pzs.make_mesh({"data": 4, "model": 2})
WHOLE = NamedSharding(MESH, P())
HALVES = NamedSharding(Mesh(np.asarray(jax.devices()[:4]), ("data",)), P())

build = functools.partial(pzs.build_train_step_fn, loss_fn)
shard = functools.partial(pzs.shard_batch, mesh=MESH, rules={"batch": "data"})
trainer = functools.partial(pzs.StatefulTrainer, loss_fn=loss_fn)


def run(state=None, x=None, **options):
    state = initial() if state is None else state
    return build(**options)(state, x=batch() if x is None else x)


def put(sharding):
    return jax.device_put(batch(), sharding)


def placed(**options):
    return jax.device_put(initial(**options), layout(MESH, **options))


def with_loss(loss, **options):
    """A step whose loss function gives or does something else."""

    def changed(model, rng, state, x):
        return loss(model, state, loss_fn(model, rng, state, x)[0])

    return pzs.build_train_step_fn(changed, **options)(initial(), x=batch())


def with_optimizer(state, update):
    """A step of an optimizer that keeps this state, and gives what ``update`` makes of it."""
    optimizer = optax.GradientTransformation(lambda p: state, lambda u, s, p: update(u, s))
    return run(initial(optimizer=optimizer))


def with_aux(reduction):
    """A step of two microbatches, whose loss function reports an integer and a float."""
    options = {"accumulate_steps": 2, "aux_reduction": reduction}
    return with_loss(lambda m, s, loss: (loss, s, {"n": 1, "top": loss}), **options)


def deleted():
    array = batch()
    array.data_array.delete()
    return array


def evaluate(call):
    return eval(call, {**vars(losses), **globals()})


# The path of one offender, and the call as a text.
# fmt: off
REFUSED = {
    RuleTypeError: [
        ("optimizer_def", "initial(optimizer=optax.adam)"),
        ("root_rng", "initial(key=7)"),
        ("", "initial(weights)"),
        ("loss_fn", "pzs.build_train_step_fn('loss')"),
        ("accumulate_steps", "build(accumulate_steps='4')"),
        ("batch_axis", "build(batch_axis=-1)"),
        ("step_metrics", "build(step_metrics='accuracy')"),
        ("step_metrics", "pzs.build_eval_step_fn(loss_fn, step_metrics='loss')"),
        ("train_state_shardings", "build(train_state_shardings=P('data'))"),
        ("train_state_shardings", "build(train_state_shardings=initial())"),
        ("n", "build(aux_reduction={'n': 'median'})"),
        ("train_state", "pzs.train_state_sharding(weights(), MESH)"),
        ("train_state", "build()({'x': batch()})"),
        ("inputs by position", "build()(initial(), batch())"),
        ("jit", "build(jit=False).lower(initial(), x=batch())"),
        ("mesh", "trainer(initial(), rules={'in': 'data'})"),
        ("on_unnamed", "shard(batch(), local=True, on_unnamed='infer')"),
    ],
    MeshError: [
        ("params/w", "initial({'a': put(HALVES), 'w': put(WHOLE)})"),
        ("x", "run(placed(), put(HALVES))"),
        ("x", "run(placed(), put(jax.devices()[3]))"),
    ],
    PlanError: [
        ("opt_state/0/mu/w", "layout(MESH, model={'w': pz.nx.ones({'in': 6})})"),
        ("x", "shard({'x': X})"),
        ("x", "shard({'x': X[:6]}, first_axis='batch')"),
    ],
    ShardingError: [
        ("loss_fn_state/a", "initial(loss_fn_state={'a': 'b'})"),
        ("", "initial({'n': jnp.arange(3)})"),
        ("w", "initial({'w': deleted()})"),
        ("params/w", "initial().replace(params={'w': pz.nx.ones({'out': 8, 'in': 8})})"),
        ("params/v", "initial().replace(params={'v': W})"),
        ("step", "initial().replace(step=0.5)"),
        ("a/b", "initial({'a/b': jnp.ones(2), 'a': {'b': jnp.ones(2)}})"),
        ("params/v", "run(train_state_shardings=layout(MESH, model={'v': batch()}))"),
        ("params/w", "run(placed(), train_state_shardings=layout(MESH, {}))"),
        ("y", "run(input_kwarg_shardings={'y': WHOLE})"),
        ("params/w", "run(jax.eval_shape(initial))"),
        ("x/b/0", "run(x={'a': batch(), 'b': ['c']})"),
        ("x", "run(x=deleted())"),
        ("", "build()(initial(), x=batch(), y=batch())"),
        ("", "build()(initial(), x=batch(), rng=KEY)"),
        # What a loss function gives and does
        ("", "with_loss(lambda m, s, loss: (jnp.ones(3), s, {}))"),
        ("", "with_loss(lambda m, s, loss: None)"),
        ("", "with_loss(lambda m, s, loss: loss)"),
        ("", "with_loss(lambda m, s, loss: ((loss, jnp.ones(3)), s, {}))"),
        ("", "with_loss(lambda m, s, loss: ({}, s, {}))"),
        ("aux/a", "with_loss(lambda m, s, loss: (loss, s, {'a': 'b'}))"),
        ("aux", "with_loss(lambda m, s, loss: (loss, s, [loss]), step_metrics='loss')"),
        ("loss_fn_state/n", "with_loss(lambda m, s, loss: (loss, {'n': 1}, {}))"),
        ("w", "with_loss(lambda m, s, loss: m.update(w=m['w'] * 2) or (loss, s, {}))"),
        ("v", "with_loss(lambda m, s, loss: m.update(v=jnp.ones(2)) or (loss, s, {}))"),
        # Microbatches
        ("x", "run(accumulate_steps=3)"),
        ("", "run(accumulate_steps=2, batch_axis=0)"),
        ("n", "with_aux(None)"),
        ("tops", "with_aux({'n': 'sum', 'tops': 'max'})"),
        ("top", "with_aux({'n': 'sum', 'top': 'concatenate'})"),
        # What an optimizer gives
        ("opt_state", "with_optimizer(jnp.ones(2), lambda u, s: (u, jnp.ones(3)))"),
        ("params/w", "with_optimizer((), lambda u, s: ({'w': u['w'][None]}, s))"),
    ],
}
# fmt: on


@pytest.mark.parametrize(
    ("error", "path", "call"),
    [(error, *case) for error, cases in REFUSED.items() for case in cases],
)
def test_refused(error, path, call):
    with pytest.raises(error) as caught:
        evaluate(call)
    assert caught.type is error
    assert path in paths_of(caught)
    assert all(problem.fix for problem in caught.value.problems)


class Loss:
    def __call__(self, **given):
        return loss_fn(**given)


def unpack(model, rng, state, x):
    return loss_fn(model, rng, state, x[0] * x[1]["b"])


def as_numpy(tree):
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == KEY.dtype else np.asarray(leaf), tree)


# fmt: off
RIGHT = [
    "run(as_numpy(initial()), as_numpy(batch()))",
    "run(placed(key=jax.random.PRNGKey(0)))",
    "run(placed(), put(NamedSharding(MESH, P(('data', 'model')))))",
    "pzs.build_train_step_fn(unpack)(initial(), x=[batch(), {'a': None, 'b': 1.0}])",
    "pzs.build_train_step_fn(functools.partial(Loss.__call__, None))(initial(), x=batch())",
    "pzs.build_train_step_fn(Loss())(initial(), x=batch())",
    "pzs.build_train_step_fn(jax.jit(loss_fn))(initial(), x=batch())",
    "run(initial(weights(act=jax.nn.relu, name='abc')))",
    "run(placed(), train_state_shardings=layout(MESH, optimizer=optax.adam(0.5)))",
    "run(jax.jit(lambda: initial())())",
    "run(jax.device_put(initial(), jax.devices()[3]))",
    "with_loss(lambda m, s, loss: (pz.nx.wrap(loss), s, {}))",
    "jax.jit(build())(initial(), x=batch())",
    "build(jit=False, donate_params_and_state=True)(initial(), x=batch())",
]
# fmt: on


@pytest.mark.parametrize("call", RIGHT)
def test_right(call):
    state, _ = evaluate(call)
    # The first step of Adam has the size of the rate, in the direction of 2 X' (X W - 1).
    expected = W - 0.1 * np.sign(X.T @ (X @ W - 1))
    np.testing.assert_allclose(state.params["w"].data_array, expected, atol=1e-4)
    assert int(state.step) == 1


def assign_in_linen(model):
    layer = next(iter(model["params"].values()))
    layer.update({name: array * 2 for name, array in layer.items()})


def assign_in_penzai(model):
    first = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()[0]
    first.value = first.value * 2


def assign_in_equinox(model):
    model.mlp.layers[0].weight = model.mlp.layers[0].weight * 2


# What is frozen says so itself; a dictionary is compared.
ASSIGNED = {
    "plain": (lambda model: model.update(w=model["w"] * 2), ShardingError),
    "linen": (assign_in_linen, ShardingError),
    "counted mlp": (assign_in_penzai, AttributeError),
    "equinox": (assign_in_equinox, AttributeError),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_assigned_parameters_are_refused(name):
    assign, error = ASSIGNED[name]
    loss, x = losses.LOSSES[name]

    def assigning(model, rng, state, x):
        result = loss(model, rng, state, x)
        assign(model)
        return result

    state = initial(MODELS[name]())
    with pytest.raises(error) as caught:
        pzs.build_train_step_fn(assigning)(state, x=x)
    assert error is AttributeError or paths_of(caught)[0] in state.params


# After a failure


def test_errors_of_the_user_pass_through_unchanged():
    calls = []

    def failing(model, rng, state, x):
        calls.append(x)
        return 1 // 0

    with pytest.raises(ZeroDivisionError) as caught:
        pzs.build_train_step_fn(failing)(initial(), x=batch())
    assert len(calls) == 1
    assert caught.value.__cause__ is None


def test_a_failed_step_takes_nothing():
    step = build(donate_params_and_state=True)
    state, _ = step(placed(), x=batch())
    # An array without names fails in the loss function itself.
    for value in ("abc", jax.eval_shape(batch), deleted(), put(jax.devices()[3]), jnp.ones(3)):
        is_plain = isinstance(value, jax.Array)
        with pytest.raises(AttributeError if is_plain else ShardingError) as caught:
            step(state, x=value)
        assert is_plain or paths_of(caught) == ["x"]
    state, _ = step(state, x=batch())
    assert int(state.step) == 2
