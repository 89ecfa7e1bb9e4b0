"""A ``torch.nn.Sequential``, trained by name on eight devices, takes torch's own steps.

Where torch is not installed, what torch computed is read from ``torch_reference``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from benchmarks.contenders import losses as losses_of
from benchmarks.parallel_training.compiled_figures import CompiledFigures
from benchmarks.torch_mlp import by_hand as hand
from benchmarks.torch_mlp import by_penzai_shard as named
from benchmarks.torch_mlp.work import LAYOUTS, Shape
from penzai_shard import (
    ConstrainShardingByName,
    Layout,
    TrainState,
    build_train_step_fn,
    cross_entropy,
    make_mesh,
    name_axes,
    place,
    restore_params,
    save_params,
    shard_batch,
    train_state_sharding,
)
from tests.readers.torch_reference import make_reference
from tests.readers.torch_reference.make_reference import STEPS, part

NAMES = {
    "0.weight": ("neurons", "embedding"),
    "0.bias": ("neurons",),
    "2.weight": ("embedding", "neurons"),
    "2.bias": ("embedding",),
    "4.weight": ("classes", "embedding"),
    "4.bias": ("classes",),
}
DATA = make_mesh({"data": 8})
BOTH = make_mesh({"data": 4, "model": 2})
FULLY_SHARDED = {"embedding": "data"}
TWO_DIMENSIONAL = {"embedding": "data", "neurons": "model", "classes": "model"}
COMPUTE = {"batch": "data", "neurons": "model", "classes": "model"}
OPTIMIZERS = {"sgd": optax.sgd(0.5, momentum=0.9), "adam": optax.adam(0.01)}

# Sums in another order, as over the parts of a batch, round as much as torch's own float32 does,
# which the reference has measured against float64: by 7e-8 in weights of 0.3.
ROUNDINGS = 8
# optax computes Adam's correction, 1 - 0.999**step, in float32, and torch in float64: half an ulp
# of 1 is 6e-5 of the first one, whose root divides each update of 0.01.
CORRECTIONS = {"sgd": 0.0, "adam": STEPS * 0.01 * 2**-24 / (1 - 0.999) / 2}


def linear(model, layer, x, inputs, outputs):
    weight, bias = model[f"{layer}.weight"], model[f"{layer}.bias"]
    assert set(weight.named_shape) == {inputs, outputs}
    return pz.nx.nmap(jnp.dot)(x.untag(inputs), weight.untag(inputs)) + bias


def loss_by_name(model, rng, state, x, y, pin=lambda hidden: hidden):
    hidden = pin(pz.nx.nmap(jnp.tanh)(linear(model, 0, x, "embedding", "neurons")))
    hidden = pz.nx.nmap(jax.nn.sigmoid)(linear(model, 2, hidden, "neurons", "embedding"))
    logits = linear(model, 4, hidden, "embedding", "classes")
    loss = cross_entropy(logits, y, vocabulary="classes")
    return loss, state, {"loss": loss}


def loss_by_position(model, rng, state, x, y):
    """The same as users of JAX write it, with plain arrays."""
    w = model
    hidden = jnp.tanh(x @ w["0.weight"].T + w["0.bias"])
    hidden = jax.nn.sigmoid(hidden @ w["2.weight"].T + w["2.bias"])
    logits = hidden @ w["4.weight"].T + w["4.bias"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, state, {"loss": loss}


def by_layout(parameters, compute, mesh, loss_fn, optimizer, weights):
    layout = Layout(parameters=parameters, compute=compute, blocks=())
    return layout.build(
        lambda: weights,
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optimizer,
        rng=jax.random.key(0),
    )


def data_parallel(optimizer, weights):
    return *by_layout({}, {"batch": "data"}, DATA, loss_by_name, optimizer, weights), DATA


def fully_sharded(optimizer, weights):
    """By the functions that a layout calls."""
    placed = place(weights, DATA, FULLY_SHARDED)
    state = TrainState.initial_state(placed, optimizer, jax.random.key(0), plain_arrays=True)
    shardings = train_state_sharding(state, DATA, FULLY_SHARDED)
    return state, build_train_step_fn(loss_by_position, train_state_shardings=shardings), DATA


def two_dimensional(optimizer, weights):
    pin = ConstrainShardingByName(BOTH, COMPUTE)
    loss_fn = functools.partial(loss_by_name, pin=pin)
    return *by_layout(TWO_DIMENSIONAL, COMPUTE, BOTH, loss_fn, optimizer, weights), BOTH


SPECS = {
    data_parallel: P(),
    fully_sharded: P(None, "data"),
    two_dimensional: P("model", "data"),
}


def run(layout, optimizer, weights, inputs, targets):
    """Losses, and the state after each step."""
    state, step, mesh = layout(optimizer, name_axes(weights, NAMES))
    batch = {"x": inputs, "y": targets}
    if layout is fully_sharded:
        batch = shard_batch(batch, mesh, {"batch": "data"}, first_axis="batch")
    else:
        batch = name_axes(batch, {"x": ("batch", "embedding"), "y": ("batch",)})
        batch = shard_batch(batch, mesh, {"batch": "data"})
    losses, after = [], []
    for _ in range(STEPS):
        state, aux = step(state, **batch)
        losses.append(float(aux["loss"]))
        after.append({name: np.array(x.data_array) for name, x in state.params.items()})
    return losses, after, state


@functools.cache
def reference():
    with np.load(make_reference.REFERENCE) as stored:
        return dict(stored)


def assert_same_steps(losses, after, expected_losses, expected_after, optimizer):
    rounding = {
        of: ROUNDINGS * float(reference()[f"{optimizer}/rounding of {of}"]) + CORRECTIONS[optimizer]
        for of in ("losses", "weights")
    }
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=rounding["losses"])
    for step, expected in expected_after.items():
        for name, array in expected.items():
            where = f"{name} after step {step}"
            np.testing.assert_allclose(
                after[step - 1][name], array, rtol=0, atol=rounding["weights"], err_msg=where
            )


def stored_steps(optimizer):
    stored = reference()
    expected = {step: part(stored, f"{optimizer}/after {step}/") for step in (1, STEPS)}
    assert all(list(weights) == list(NAMES) for weights in expected.values())
    return stored[f"{optimizer}/losses"], expected


@functools.cache
def run_from_reference(layout, optimizer):
    stored = reference()
    start = part(stored, "start/")
    return run(layout, OPTIMIZERS[optimizer], start, stored["inputs"], stored["targets"])


@pytest.mark.parametrize("layout", SPECS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_that_torch_took(layout, optimizer):
    losses, after, state = run_from_reference(layout, optimizer)
    assert_same_steps(losses, after, *stored_steps(optimizer), optimizer)
    weight = state.params["0.weight"].data_array
    assert weight.sharding.spec == SPECS[layout]


@pytest.mark.parametrize("layout", SPECS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_live_weights_of_torch_take_the_same_steps(layout, optimizer):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'penzai-shard[torch]'")
    inputs, targets = make_reference.batch(seed=5)
    module = make_reference.classifier(seed=5)
    weights = module.state_dict()
    before = {name: x.clone() for name, x in weights.items()}
    expected_losses, expected = make_reference.train(optimizer, weights, inputs, targets)
    losses, after, _ = run(layout, OPTIMIZERS[optimizer], weights, inputs, targets)
    expected = {step + 1: arrays for step, arrays in enumerate(expected)}
    assert_same_steps(losses, after, expected_losses, expected, optimizer)
    assert all(bool((before[name] == x).all()) for name, x in module.state_dict().items())


def test_trained_weights_go_back_into_the_module():
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: pip install 'penzai-shard[torch]'"
    )
    _, after, state = run_from_reference(two_dimensional, "adam")
    module = make_reference.classifier(seed=7)
    module.load_state_dict(
        {name: torch.tensor(np.asarray(x.data_array)) for name, x in state.model.items()}
    )
    inputs = torch.from_numpy(reference()["inputs"])
    loss = torch.nn.functional.cross_entropy(
        module(inputs), torch.from_numpy(reference()["targets"]).long()
    )
    expected, *_ = loss_by_position(
        after[-1], None, None, reference()["inputs"], reference()["targets"]
    )
    np.testing.assert_allclose(loss.item(), float(expected), rtol=1e-6)


def test_the_stored_reference_is_what_torch_computes():
    pytest.importorskip("torch", reason="torch is not installed: pip install 'penzai-shard[torch]'")
    stored, made = reference(), make_reference.results(seed=1)
    assert list(stored) == list(made)
    for name, array in made.items():
        np.testing.assert_allclose(array, stored[name], rtol=0, atol=1e-6, err_msg=name)


def test_a_step_by_name_does_the_work_of_one_written_by_hand():
    """In the program of the benchmark, compiled for 4x2: no operation, byte or collective more."""
    shape, layout = Shape(pixels=16, hidden=32, width=16, batch=32), LAYOUTS["4x2"]
    by_hand, by_name = (module.build(shape, layout) for module in (hand, named))
    assert by_name.parameters == by_hand.parameters == shape.parameters
    np.testing.assert_allclose(losses_of(by_name), losses_of(by_hand), rtol=1e-6)
    expected, found = (CompiledFigures.of(c.compiled, layout.mesh) for c in (by_hand, by_name))
    assert found.collectives_text() == expected.collectives_text()
    assert found.flops <= 1.001 * expected.flops
    assert found.bytes_accessed <= 1.001 * expected.bytes_accessed
    assert found.temporaries <= 1.01 * expected.temporaries


def test_trained_weights_go_on_where_another_mesh_restores_them(tmp_path):
    """Trained on 4x2, saved, restored onto eight devices, and back in the order of torch."""
    _, after, state = run_from_reference(two_dimensional, "sgd")
    saved = save_params(tmp_path / "weights", state.model)
    like = name_axes(part(reference(), "start/"), NAMES)
    restored = restore_params(saved, like, DATA, FULLY_SHARDED)
    assert list(restored) == list(NAMES)
    assert restored["2.weight"].data_array.sharding.spec == P("data")
    for name, array in restored.items():
        np.testing.assert_array_equal(array.data_array, after[-1][name])


@pytest.mark.parametrize(
    ("optimizer", "other"),
    [("sgd", optax.sgd(0.5, momentum=0.899)), ("adam", optax.adam(0.01001))],
)
def test_an_optimizer_that_differs_in_the_third_digit_is_told_apart(optimizer, other):
    stored = reference()
    start = part(stored, "start/")
    losses, after, _ = run(data_parallel, other, start, stored["inputs"], stored["targets"])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_steps(losses, after, *stored_steps(optimizer), optimizer)
