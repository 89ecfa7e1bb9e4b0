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
    Checkpointed,
    InPrecision,
    Jitted,
    Scoped,
    ShardMapped,
    WrapperLayer,
)
from penzai_shard.meshes import make_mesh
from penzai_shard.surgery import scope_layers

WRAPPERS = {
    "Jitted": Jitted,
    "Checkpointed": Checkpointed,
    "Scoped": lambda body: Scoped(body, "scope"),
    "InPrecision": lambda body: InPrecision(body, "float32"),
    "ShardMapped": lambda body: ShardMapped(body, make_mesh({"data": 8}), {}, {}),
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
    if type(layer) is not ShardMapped:  # JAX's devices are not pickled.
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


def sampled(model):
    sampler = sampling_mode.KVCachingTransformerLM.from_uncached(
        model, cache_len=8, batch_axes={"batch": 2}
    )
    prompt = pz.nx.wrap(jnp.asarray([[0, 3, 4], [5, 6, 7]]), "batch", "seq")
    for kind in (lambda layer: layer, Jitted, lambda layer: Scoped(layer, "sampler")):
        yield simple_decoding_loop.temperature_sample_pyloop(
            kind(copy_of_state(sampler)), prompt, rng=jax.random.key(1), max_sampling_steps=4
        ).unwrap("batch", "seq")


def copy_of_state(sampler):
    unbound, state = pz.unbind_variables(sampler)
    return pz.bind_variables(
        unbound, [variable.freeze() for variable in state], unfreeze_as_copy=True
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_penzai_samples_from_a_model_wrapped_at_every_layer(small, stacked):
    bare = small.llama(use_layer_stack=stacked)
    expected = list(sampled(bare))
    wrapped = scope_layers().apply(bare)
    assert type(wrapped) is Scoped
    for ours, theirs in zip(sampled(wrapped), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    around_blocks = pz.select(bare).at_instances_of(TransformerBlock).apply(Checkpointed)
    np.testing.assert_array_equal(next(sampled(Jitted(around_blocks))), expected[0])
