"""What Penzai's documentation promises of its models holds for edited ones, under every recipe.

Each claim gets ``edit``, which applies a recipe, and whether the model's blocks are stacked. It
judges the edited model by Penzai's own, or by arithmetic.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.models.transformer import model_parts, sampling_mode, simple_decoding_loop
from penzai.toolshed import basic_training, isolate_submodel, lora

import penzai_shard as pzs
from tests.models import llama

# Two devices are enough to split over, and programs for more take longer to compile.
MESH = pzs.make_mesh({"data": 2}, jax.devices()[:2])
BLOCK = model_parts.TransformerBlock
BATCH = {"batch": "data"}
RECIPES = {
    # Those that change no number go together, which takes a sixth of the time.
    "together": pzs.scope_layers()
    + pzs.keep_axis_order()
    + pzs.rematerialise_blocks(BLOCK, "dots")
    + pzs.constrain_blocks(BLOCK, MESH, BATCH)
    + pzs.mixed_precision("float32")
    + pzs.jit_root(),
    "roll_layer_stacks": pzs.roll_layer_stacks(),
    "manual_fsdp": pzs.manual_fsdp(BLOCK, MESH, {"embedding": "data", **BATCH}),
}
TOKENS = pz.nx.wrap(jax.random.randint(jax.random.key(3), (4, 6), 1, 16), "batch", "seq")
SHARED = {"blocks": pz.nn.LayerStackVarBehavior.SHARED}
ORDER = ("batch", "seq", "vocabulary")


@functools.cache
def model(stacked):
    return llama(stacked=stacked, kv_heads=1, blocks=2 if stacked else 1)


@functools.cache
def expected(compute, stacked):
    """What the original computes."""
    return compute(model(stacked))


def logits(model, tokens=TOKENS, **side_inputs):
    return np.asarray(model(tokens, **side_inputs).unwrap(*ORDER))


def caching(stacked):
    return sampling_mode.KVCachingTransformerLM.from_uncached(
        model(stacked), cache_len=6, batch_axes={"batch": 4}
    )


def copy(model):
    unbound, values = pz.unbind_variables(model, freeze=True)
    return pz.bind_variables(unbound, [value.unfreeze_as_copy() for value in values])


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


@pz.pytree_dataclass
class Counter(pz.nn.Layer):
    """Passes its input on, and counts its calls."""

    calls: pz.StateVariable

    def __call__(self, x, /, **side_inputs):
        self.calls.value = self.calls.value + 1
        return x


def loss_fn(model, rng, state, tokens):
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(model(tokens).untag("vocabulary")).tag("vocabulary")
    loss = -(log_probs**2).untag(*ORDER).mean().unwrap()
    return loss, state, {"loss": loss}


def claim_logits_are_the_same(edit, stacked):
    assert_close(logits(edit(model(stacked))), expected(logits, stacked))


def claim_attention_is_causal(edit, stacked):
    last = pz.nx.wrap(jnp.arange(6) == 5, "seq")
    changed = pz.nx.nmap(jnp.where)(last, 1, TOKENS)
    positions = pz.nx.arange("seq", 6)
    found = logits(edit(model(stacked)), changed, token_positions=positions)
    assert_close(found[:, :-1], expected(logits, stacked)[:, :-1])
    assert not np.allclose(found[:, -1], expected(logits, stacked)[:, -1], rtol=0.1)


def halve(model):
    """The labels of the parameters, and logits with half of each."""
    unbound, parameters = pz.unbind_params(model, freeze=True)
    halves = [dataclasses.replace(one, value=one.value / 2) for one in parameters]
    return [one.label for one in parameters], logits(pz.bind_variables(unbound, halves))


def claim_parameters_are_known_by_label(edit, stacked):
    (labels, found), (own, values) = halve(edit(model(stacked))), expected(halve, stacked)
    assert labels == own
    assert_close(found, values)


def claim_lora_trains_the_update_only(edit, stacked):
    frozen = copy(model(stacked))
    for parameter in pz.unbind_params(frozen)[1]:
        parameter.metadata = {**parameter.metadata, "trainable": False}
    # Penzai's adapters do not go into stacks of layers: there the last layer gets one.
    layer = (lambda root: root.body.sublayers[-1]) if stacked else (lambda root: root.body)
    selection = pz.select(frozen).at(layer)
    adapted = edit(lora.loraify_linears_in_selection(selection, 2, jax.random.key(5)))
    state = pzs.TrainState.initial_state(adapted, optax.sgd(0.1), jax.random.key(0))
    after, aux = pzs.build_train_step_fn(loss_fn)(state, tokens=TOKENS)
    # An adapter changes nothing before it is trained.
    assert_close(aux["loss"], expected(losses, stacked)[0])
    kept = [
        np.array_equal(after.params[path].data_array, array.data_array)
        for path, array in state.params.items()
    ]
    assert kept == ["LoRA_B" not in path for path in state.params]


def claim_cache_gives_the_logits_of_the_whole(edit, stacked):
    sampler = edit(caching(stacked))
    pieces = [logits(sampler, TOKENS[{"seq": pz.slice[i : i + 3]}]) for i in (0, 3)]
    assert_close(np.concatenate(pieces, axis=1), expected(logits, stacked))


def sample(model):
    tokens = simple_decoding_loop.temperature_sample_pyloop(
        model,
        prompt=TOKENS[{"seq": pz.slice[:3]}],
        rng=jax.random.key(7),
        max_sampling_steps=3,
    )
    return np.asarray(tokens.unwrap("batch", "seq"))


@functools.cache
def expected_tokens(stacked):
    return sample(pzs.Jitted(caching(stacked)))


def claim_sampling_gives_the_same_tokens(edit, stacked):
    np.testing.assert_array_equal(sample(edit(caching(stacked))), expected_tokens(stacked))


def claim_selectors_reach_the_layers(edit, stacked):
    counter = Counter(pz.StateVariable(jnp.zeros((), int), metadata={"layerstack_axes": SHARED}))
    attention = pz.select(edit(model(stacked))).at_instances_of(pz.nn.Attention)
    counted = attention.apply(lambda layer: pz.nn.Sequential([layer, counter]))
    assert_close(logits(counted), expected(logits, stacked))
    assert counter.calls.value == (2 if stacked else 1)


def claim_dropout_draws_by_the_stream(edit, stacked):
    dropping = (
        pz.select(model(stacked))
        .at_instances_of(pz.nn.Attention)
        .insert_after(pz.nn.StochasticDropout(0.5))
    )
    edited = edit(dropping)
    streams = map(pz.RandomStream.from_base_key, map(jax.random.key, (1, 1, 2)))
    first, again, other = (logits(edited, random_stream=stream) for stream in streams)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


def losses(model):
    trainer = basic_training.StatefulTrainer.build(
        jax.random.key(0), copy(model), optax.sgd(0.1), loss_fn
    )
    return [float(trainer.step(tokens=TOKENS)["loss"]) for _ in range(2)]


def claim_penzais_trainer_trains_it(edit, stacked):
    assert_close(losses(edit(model(stacked))), expected(losses, stacked))


def gradients(model):
    unbound, parameters = pz.unbind_params(model, freeze=True)

    def loss(frozen):
        return loss_fn(pz.bind_variables(unbound, frozen), None, None, TOKENS)[0]

    return jax.jit(jax.grad(loss))(parameters)


def claim_gradients_are_by_frozen_variables(edit, stacked):
    jax.tree.map(assert_close, gradients(edit(model(stacked))), expected(gradients, stacked))


def claim_a_part_can_be_isolated(edit, stacked):
    blocks = pz.select(edit(model(stacked))).at_instances_of(BLOCK)
    # In a loop over stacked blocks a variable would have to be stacked too.
    if not stacked:
        part = isolate_submodel.call_and_extract_submodel(blocks.pick_nth_selected(0), TOKENS)
        values, inputs = part.initial_var_values, part.saved_side_inputs
        again, _ = part.submodel.stateless_call(values, part.saved_arg, **inputs)
        names = part.saved_output.named_axes
        assert_close(again.unwrap(*names), part.saved_output.unwrap(*names))


CLAIMS = {name: claim for name, claim in globals().items() if name.startswith("claim_")}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("claim", CLAIMS)
def test_edited_models_do_what_penzai_says(claim, recipe):
    def edit(model):
        return pzs.Jitted(RECIPES[recipe].apply(model))

    CLAIMS[claim](edit, recipe == "roll_layer_stacks")
