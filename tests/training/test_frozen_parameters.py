"""Frozen parameters are not trained, wherever the model has been: LoRA on tied, frozen models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.toolshed import lora

import penzai_shard as pzs
from penzai_shard.errors import ShardingError
from penzai_shard.training import TrainState, build_train_step_fn
from tests.model_families import transformer

TIED = "transformer/embedder.embeddings"
RULES = {"embedding": "data", "neurons": "model", "vocabulary": "model", "batch": "data"}
TOKENS = pz.nx.wrap(jax.random.randint(jax.random.key(2), (8, 4), 0, 16), "batch", "seq")


def base_model():
    options = {"num_kv_heads": 1, "num_decoder_blocks": 1, "tie_embedder_and_logits": True}
    return transformer("llama", jax.random.key(0), **options)


@pytest.fixture(scope="module")
def adapted():
    """A frozen model with tied embeddings and a LoRA adapter around every linear layer."""
    frozen = pz.freeze_params(base_model())
    return lora.loraify_linears_in_selection(
        pz.select(frozen), rank=2, init_base_rng=jax.random.key(1)
    )


@pytest.fixture(scope="module")
def base_values():
    return {
        parameter.label: np.asarray(parameter.value.data_array)
        for parameter in pz.unbind_params(base_model(), freeze=True)[1]
    }


def initial(model, **kwargs):
    return TrainState.initial_state(model, optax.sgd(0.5), jax.random.key(3), **kwargs)


def loss_fn(model, rng, state, tokens):
    logits = model(tokens).untag("vocabulary")
    chosen = pz.nx.nmap(lambda row, token: jax.nn.log_softmax(row)[token])(logits, tokens)
    loss = -chosen.untag("batch", "seq").mean().unwrap()
    return loss, state, {"loss": loss}


STEP = build_train_step_fn(loss_fn)


def train(state):
    losses = []
    for _ in range(2):
        state, aux = STEP(state, tokens=TOKENS)
        losses.append(float(aux["loss"]))
    return state, losses


def occurrences(model, label):
    found = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
    return [value for value in found if value.label == label]


@pytest.fixture(scope="module")
def reference(adapted):
    return train(initial(adapted))


def assert_trained_alike(model, reference, base_values):
    state, losses = train(initial(model))
    expected, expected_losses = reference
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert set(state.params) - state.variables.trainable_names == set(base_values)
    for name, value in base_values.items():
        np.testing.assert_array_equal(state.params[name].data_array, value)
    assert all(name.startswith("LoRA:") for name in state.variables.trainable_names)
    for name in state.variables.trainable_names:
        np.testing.assert_allclose(
            state.params[name].data_array,
            expected.params[name].data_array,
            rtol=1e-4,
            atol=1e-6,
        )
    first, second = occurrences(state.model, TIED)
    assert first is second


def test_adapters_are_trained_and_the_frozen_model_stays_to_the_bit(
    adapted, reference, base_values
):
    state, losses = reference
    assert losses[1] < losses[0]
    assert_trained_alike(adapted, reference, base_values)
    trained = state.variables.trainable_names
    moved = [n for n in trained if n.endswith("LoRA_B.weights")]
    assert moved
    assert all(np.any(state.params[name].data_array) for name in moved)
    assert len(occurrences(adapted, TIED)) == 2


@pytest.mark.parametrize(
    "route", ["place", "device_put", "jax.tree.map", "checkpoint", "checkpoint of a placed model"]
)
def test_the_same_after(route, adapted, reference, base_values, mesh, tmp_path):
    model = adapted
    if route in ("place", "checkpoint of a placed model"):
        model = pzs.place(adapted, mesh, RULES)
    if route == "device_put":
        frozen = pz.freeze_variables(adapted)
        shardings = pzs.make_plan(adapted, mesh, RULES).sharding_tree()
        placed = jax.device_put(frozen, shardings)
        adapters = pz.select(placed).at_instances_of(pz.ParameterValue)
        model = adapters.where(lambda v: v.label.startswith("LoRA:")).apply(
            lambda v: v.unfreeze_as_copy()
        )
    if route == "jax.tree.map":

        def copied(leaf):
            return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf

        model = jax.tree.map(copied, adapted)
        first, second = occurrences(model, TIED)
        assert first is not second
        assert first.value.data_array is not second.value.data_array
    if route.startswith("checkpoint"):
        pzs.save_params(tmp_path / "saved", model)
        model = pzs.restore_params(tmp_path / "saved", adapted, mesh, RULES)
    assert_trained_alike(model, reference, base_values)


def test_a_whole_run_goes_on_from_a_checkpoint(adapted, reference, mesh, tmp_path):
    state, _ = STEP(initial(adapted), tokens=TOKENS)
    pzs.save_train_state(tmp_path / "run", state)
    restored = pzs.restore_train_state(tmp_path / "run", initial(adapted), mesh, RULES)
    assert restored.variables == state.variables
    after, _ = STEP(restored, tokens=TOKENS)
    for name, value in reference[0].params.items():
        np.testing.assert_allclose(
            after.params[name].data_array, value.data_array, rtol=1e-4, atol=1e-6
        )


def test_two_values_of_one_name_that_differ_are_refused(adapted):
    changed = (
        pz.select(adapted)
        .at_instances_of(pz.ParameterValue)
        .where(lambda v: v.label == TIED)
        .pick_nth_selected(1)
        .apply(lambda v: pz.ParameterValue(label=v.label, value=v.value + 1, metadata={}))
    )
    with pytest.raises(ShardingError, match=f"another variable of the model is named '{TIED}' too"):
        initial(changed)


def small(**kinds):
    """A model of parameters by name, frozen or not."""
    made = {
        name: pz.Parameter(value=pz.nx.ones({"a": 2}), label=name, metadata={}) for name in kinds
    }
    return {
        name: parameter.freeze() if kinds[name] == "frozen" else parameter
        for name, parameter in made.items()
    }


def test_frozen_parameters_are_trained_if_the_predicate_says_so():
    model = small(a="frozen", b="mutable")
    assert initial(model).variables.trainable_names == {"b"}
    everything = initial(model, trainable=lambda parameter: True)
    assert everything.variables.trainable_names == {"a", "b"}
    assert isinstance(everything.model["a"], pz.ParameterValue)


def test_a_model_of_which_nothing_would_be_trained_is_refused():
    model = small(a="frozen", b="frozen")
    with pytest.raises(ShardingError) as caught:
        initial(model)
    assert str(caught.value) == (
        "nothing of this model would be trained: all of its 2 parameters are frozen or not "
        "floating, such as 'a'. Say which to train: "
        "TrainState.initial_state(..., trainable=lambda parameter: True)."
    )
    assert not initial(model, trainable=lambda parameter: False).variables.trainable_names


def test_structs_say_nothing_of_being_frozen():
    concrete = small(a="frozen", b="mutable")

    def abstract(value):
        return jax.eval_shape(lambda: value)

    model = abstract(pz.freeze_variables(concrete))
    assert initial(model).variables.trainable_names == {"a", "b"}
    traced = jax.eval_shape(lambda: initial(concrete))
    assert traced.variables.trainable_names == {"b"}
