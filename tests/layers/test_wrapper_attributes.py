"""Attributes of a wrapped layer are read through every wrapper."""

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from penzai import pz
from penzai.models.transformer import sampling_mode, simple_decoding_loop
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard.layers import (
    AxesInPlace,
    Checkpointed,
    ConstrainActivations,
    GatherParameters,
    InPrecision,
    Jitted,
    Scoped,
    ShardMapped,
    WrapperLayer,
)
from penzai_shard.meshes import make_mesh
from penzai_shard.surgery import (
    Recipe,
    constrain_blocks,
    manual_fsdp,
    mixed_precision,
    rematerialise_blocks,
    roll_layer_stacks,
    scope_layers,
    wrap,
)
from penzai_shard.surgery.standard_recipes import is_model_layer

MESH = make_mesh({"data": 8})

WRAPPERS = {
    "Jitted": Jitted,
    "AxesInPlace": AxesInPlace,
    "Checkpointed": Checkpointed,
    "Scoped": lambda body: Scoped(body, "scope"),
    "InPrecision": lambda body: InPrecision(body, "float32"),
    "ShardMapped": lambda body: ShardMapped(body, MESH, {}, {}),
    "GatherParameters": lambda body: GatherParameters(body, MESH, {}),
    "ConstrainActivations": lambda body: ConstrainActivations(body, MESH),
}


@pytest.fixture(params=WRAPPERS)
def wrapper(request):
    return WRAPPERS[request.param]


@pz.pytree_dataclass
class Tokenised(pz.nn.Layer):
    """A layer whose fields, properties and methods are read from outside."""

    scale: float
    pad_id: int = dataclasses.field(default=7, metadata={"pytree_node": False})
    name: str = dataclasses.field(default="inner", metadata={"pytree_node": False})

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        return argument * self.scale

    def __jax_array__(self):
        raise AssertionError("a wrapper is not an array because its body is one")

    def _repr_html_(self):
        return "the inner layer's view"

    def treescope_color(self):
        return "red"

    def doubled(self) -> float:
        return 2 * self.scale

    @property
    def failing(self) -> Any:
        return self.scale.missing


def test_fields_and_methods_of_the_body_are_found(wrapper):
    layer = wrapper(wrapper(Tokenised(3.0)))
    assert (layer.pad_id, layer.scale, layer.doubled()) == (7, 3.0, 6.0)
    assert "pad_id" in dir(layer)


def test_own_fields_come_first():
    layer = Scoped(Tokenised(3.0), "outer")
    assert (layer.name, layer.body.name) == ("outer", "inner")
    assert dataclasses.replace(layer, name="other").name == "other"


def test_a_field_of_the_body_cannot_be_replaced_on_the_wrapper(wrapper):
    with pytest.raises(TypeError, match="pad_id"):
        dataclasses.replace(wrapper(Tokenised(3.0)), pad_id=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        wrapper(Tokenised(3.0)).pad_id = 0


def test_private_names_and_protocols_are_not_those_of_the_body(wrapper):
    layer = wrapper(Tokenised(3.0))
    for name in ("__jax_array__", "_repr_html_", "_scale"):
        assert getattr(layer, name, None) is None, name
    assert layer.treescope_color() != "red"
    assert jax.tree_util.tree_leaves(layer) == [3.0]
    assert type(layer).__name__ in treescope.render_to_text(layer)


def test_an_attribute_that_is_nowhere_names_all_types():
    layer = Jitted(Scoped(Tokenised(3.0), "scope"))
    with pytest.raises(AttributeError) as raised:
        layer.pad_idd
    assert str(raised.value) == (
        "neither 'Jitted' nor what it wraps has an attribute 'pad_idd': "
        "Jitted around Scoped around Tokenised"
    )


def test_a_property_that_fails_keeps_its_message():
    with pytest.raises(AttributeError, match=r"^'float' object has no attribute 'missing'$"):
        Jitted(Checkpointed(Tokenised(3.0))).failing


def test_half_built_wrappers_do_not_recurse(wrapper):
    kind = type(wrapper(Tokenised(3.0)))
    with pytest.raises(AttributeError, match=r"object has no attribute 'pad_id'$"):
        object.__new__(kind).pad_id
    assert dir(object.__new__(kind))


def test_copies_and_pickles_read_the_same(wrapper):
    layer = wrapper(Tokenised(3.0))
    duplicates = [copy.copy(layer), copy.deepcopy(layer)]
    # JAX's devices are not pickled.
    if type(layer) not in (ShardMapped, GatherParameters, ConstrainActivations):
        duplicates.append(pickle.loads(pickle.dumps(layer)))
    for duplicate in duplicates:
        assert duplicate == layer
        assert duplicate.pad_id == 7


def test_every_wrapper_of_this_library_reads_through():
    from penzai_shard import layers

    kinds = [getattr(layers, name) for name in layers.__all__]
    wrappers = {
        kind
        for kind in kinds
        if isinstance(kind, type)
        and issubclass(kind, pz.nn.Layer)
        and "body" in getattr(kind, "__dataclass_fields__", ())
    }
    assert len(wrappers) == len(WRAPPERS)
    assert all(issubclass(kind, WrapperLayer) for kind in wrappers)


def sampler_of(model, batch):
    return sampling_mode.KVCachingTransformerLM.from_uncached(
        model, cache_len=8, batch_axes={"batch": batch}
    )


def test_penzai_samples_from_a_wrapped_sampler(small):
    def sampled(layer):
        return simple_decoding_loop.temperature_sample_pyloop(
            layer,
            prompt=pz.nx.wrap(jnp.asarray([[0, 3, 4], [5, 6, 7]]), "batch", "seq"),
            rng=jax.random.key(1),
            max_sampling_steps=2,
        ).unwrap("batch", "seq")

    model = small.llama()
    scoped = Jitted(Scoped(sampler_of(scope_layers().apply(model), 2), "sampler"))
    np.testing.assert_array_equal(sampled(scoped), sampled(Jitted(sampler_of(model, 2))))


RECIPES = {
    "constrain_blocks": constrain_blocks(TransformerBlock, MESH, {"batch": "data"}),
    "rematerialise_blocks": rematerialise_blocks(TransformerBlock),
    "scope_layers": scope_layers(),
    "manual_fsdp": manual_fsdp(TransformerBlock, MESH, {"embedding": "data", "batch": "data"}),
    "mixed_precision": mixed_precision("float32"),
    "roll_layer_stacks": roll_layer_stacks(),
    "Jitted everywhere": Recipe(wrap(is_model_layer, Jitted, nested=True)),
    "Checkpointed everywhere": Recipe(wrap(is_model_layer, Checkpointed, nested=True)),
}


@jax.jit
def logits_and_cache(model):
    sampler = sampler_of(model, 8)
    tokens = pz.nx.wrap(jnp.arange(24).reshape(8, 3) % 16, "batch", "seq")
    logits = sampler(tokens).unwrap("batch", "seq", "vocabulary")
    return logits, {state.label: state.value for state in pz.unbind_state_vars(sampler)[1]}


@pytest.fixture(scope="module")
def bare_results(small):
    """For plain and stacked models the model, and what it computes."""
    models = {stacked: small.llama(use_layer_stack=stacked) for stacked in (False, True)}
    return {
        stacked: (model, logits_and_cache(pz.freeze_variables(model)))
        for stacked, model in models.items()
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_edited_by_a_recipe_gets_a_key_value_cache(bare_results, name):
    model, expected = bare_results[name == "roll_layer_stacks"]
    edited = RECIPES[name].apply(model)
    assert edited.metadata == model.metadata
    results = pz.nx.order_like(logits_and_cache(pz.freeze_variables(edited)), expected)
    assert jax.tree_util.tree_structure(results) == jax.tree_util.tree_structure(expected)
    for ours, theirs in zip(*map(jax.tree_util.tree_leaves, (results, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
