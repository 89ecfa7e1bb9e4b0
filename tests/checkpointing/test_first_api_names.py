"""Checkpoints of models of Penzai's first API, restored into the same models of today's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from penzai.deprecated.v1.example_models import simple_mlp as first_mlp
from penzai.deprecated.v1.example_models.gemma import model_core as first_gemma
from penzai.models import simple_mlp
from penzai.models.transformer.variants import llamalike_common

from penzai_shard.checkpointing import (
    first_api_names,
    param_dict,
    restore_params,
    save_params,
    with_params,
)
from penzai_shard.errors import CheckpointMismatchError
from penzai_shard.layers import Jitted
from penzai_shard.placement import abstract_model

SIZES = {
    "embedding_dim": 8,
    "projection_dim": 4,
    "mlp_hidden_dim": 16,
    "vocab_size": 16,
    "parameter_dtype": jnp.float32,
    "activation_dtype": jnp.float32,
}
TOKENS = pz.nx.wrap(jnp.array([2, 5, 7]), "seq")


def initialised(definition):
    """With some numbers, all of them different."""
    values = {}
    for number, (name, struct) in enumerate(param_dict(definition).items()):
        shape = struct.data_array.shape
        data = np.sin(np.arange(np.prod(shape)) + number).reshape(shape).astype(np.float32)
        values[name] = pz.nx.wrap(jnp.asarray(data), *struct.named_shape)
    return with_params(definition, values)


def first_gemma_model(*, one_head, blocks=1):
    config = first_gemma.GemmaTransformerConfig(
        num_heads=2, single_kv_head=one_head, num_decoder_blocks=blocks, **SIZES
    )
    return initialised(first_gemma.GemmaTransformer.from_config(config))


def gemma_model(*, one_head, stacked=False, blocks=1):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=1 if one_head else 2,
        query_head_multiplier=2 if one_head else 1,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
        use_layer_stack=stacked,
        num_decoder_blocks=blocks,
        **SIZES,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="lm")


@pytest.fixture(scope="module")
def first():
    return first_gemma_model(one_head=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, first):
    return save_params(tmp_path_factory.mktemp("first") / "params", first)


def test_an_mlp_computes_the_same(tmp_path, wide):
    first = initialised(first_mlp.MLP.from_config([8, 16, 4]))
    path = save_params(tmp_path / "params", first)
    abstract = abstract_model(
        simple_mlp.MLP.from_config, init_base_rng=jax.random.key(0), feature_sizes=[8, 16, 4]
    )
    model = restore_params(path, abstract, wide, {}, names=first_api_names(path, abstract))
    x = pz.nx.wrap(jnp.linspace(-1, 1, 16).reshape(2, 8), "batch", "features")
    expected = first(x).unwrap("batch", "features")
    np.testing.assert_array_equal(model(x).unwrap("batch", "features"), expected)


def test_a_gemma_computes_the_same(first, saved, wide):
    abstract = abstract_model(gemma_model, one_head=True)
    names = first_api_names(saved, abstract)
    assert names["block_0.attn.query.weights"] == "lm/block_0/attention/query.weights"
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_params(saved, abstract, wide, {}, names=names)
    fix = re.search(r"rename_axes=(\{[^}]*\})", str(caught.value))[1]
    model = restore_params(saved, abstract, wide, {}, names=names, rename_axes=eval(fix))
    inputs = first_gemma.GemmaInputs.from_basic_segments(TOKENS)
    expected = jax.jit(lambda model, inputs: model(inputs))(first, inputs)
    np.testing.assert_allclose(
        Jitted(model)(TOKENS).unwrap("seq", "vocabulary"),
        expected.unwrap("seq", "vocabulary"),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_gemma_with_all_its_heads_is_restored_into_stacked_blocks(tmp_path, wide):
    first = first_gemma_model(one_head=False, blocks=2)
    path = save_params(tmp_path / "params", first)
    abstract = abstract_model(gemma_model, one_head=False, stacked=True, blocks=2)
    names = first_api_names(path, abstract)
    model = restore_params(path, abstract, wide, {}, names=names, on_block_mismatch="convert")
    old, new = param_dict(first), param_dict(model)
    for name, value in old.items():
        if name.startswith("block_"):
            block, _, rest = name.replace("attn", "attention").partition(".")
            found = {tuple(re.split(r"[./]", n)): v for n, v in new.items()}
            stack = found[("lm", "blocks", *rest.split("."))]
            array = stack.data_array[int(block.removeprefix("block_"))]
            np.testing.assert_array_equal(array, value.data_array, err_msg=name)


def test_a_model_with_other_layers_is_refused_by_name(saved, wide):
    smaller = abstract_model(gemma_model, one_head=True, blocks=0)
    said = r"block_0\.attn\.query\.weights: the model has no parameter of this name in any"
    with pytest.raises(CheckpointMismatchError, match=said) as caught:
        first_api_names(saved, smaller)
    assert len(caught.value.problems) == 9


def test_a_model_that_has_the_same_names_twice_is_refused(tmp_path):
    path = save_params(tmp_path / "params", {"Linear.weights": pz.nx.ones({"a": 2})})
    both = {f"{side}/Linear.weights": pz.nx.ones({"a": 2}) for side in ("left", "right")}
    said = r"the model has these names all under each of 'left', 'right'\. Give the one"
    with pytest.raises(CheckpointMismatchError, match=said):
        first_api_names(path, both)
    assert first_api_names(path, {"left/Linear.weights": pz.nx.ones({"a": 2})})
