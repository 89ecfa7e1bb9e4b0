"""Models of transformers come out as by way of torch and Penzai's converters, to the bit."""

import copy
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from penzai.models.transformer.variants import gemma, gpt_neox, llamalike_common

from penzai_shard.errors import CheckpointMismatchError
from penzai_shard.pretrained.conversion import converted_model
from tests.pretrained import gemma_in_flax
from tests.pretrained.hugging_face_models import MODELS, TOKENS, logits_of_torch, model_of_torch
from tests.pretrained.penzai_models import (
    assert_same_logits,
    assert_same_models,
    filled,
    logits,
    parameters,
)
from tests.pretrained.tensors_in_memory import TensorsInMemory

_ABSENT = "{0} is not installed: pip install 'penzai-shard[torch]'"
torch = pytest.importorskip("torch", reason=_ABSENT.format("torch"))
pytest.importorskip("transformers", reason=_ABSENT.format("transformers"))
safetensors_numpy = pytest.importorskip("safetensors.numpy", reason=_ABSENT.format("safetensors"))


def penzai_route(model, config, reader, monkeypatch, **options):
    """Penzai's model of torch's, by the converter that Penzai has for it.

    transformers 5 says elsewhere what the converters look for, and more; so they are shown the
    configuration of before. Of Gemma, Penzai knows the sizes that were published, and here others.
    """
    attributes, rotary = model.config, model.config.rope_parameters
    match config["model_type"]:
        case "llama" | "mistral":
            attributes.rope_theta = rotary["rope_theta"]
            return llamalike_common.llamalike_from_huggingface_model(model, **options)
        case "gpt_neox":
            attributes.rotary_emb_base = rotary["rope_theta"]
            attributes.rotary_pct = rotary["partial_rotary_factor"]
            monkeypatch.setattr(type(attributes), "to_dict", lambda self: {})
            state = model.state_dict()
            state["embed_out.weight"] = state.pop("lm_head.weight")
            monkeypatch.setattr(model, "state_dict", lambda: state)
            converted = gpt_neox.gpt_neox_from_huggingface_model(model, **options)
            # Penzai leaves the last norm its default, whatever the configuration says.
            norms = pz.select(converted).at_instances_of(pz.nn.Standardize)
            epsilon = attributes.layer_norm_eps
            return norms.apply(lambda norm: dataclasses.replace(norm, epsilon=epsilon))
    preset = gemma_in_flax.preset(config)
    if "layer_types" in config:
        preset["attention_type"] = attention_types(config)
    monkeypatch.setitem(gemma._GEMMA_PRESETS, "small", preset)
    monkeypatch.setitem(gemma._NEEDS_GATING_TRANSPOSE, "small", False)
    arrays = jax.tree.map(jnp.asarray, gemma_in_flax.checkpoint(reader.arrays, config))
    return gemma.gemma_from_pretrained_checkpoint(arrays, preset_name="small", **options)


def attention_types(config):
    window = llamalike_common.AttentionTypeSlidingWindowCausal(config["sliding_window"])
    everywhere = llamalike_common.AttentionTypeGlobalCausal()
    kinds = {"sliding_attention": window, "full_attention": everywhere}
    types = tuple(kinds[kind] for kind in config["layer_types"])
    return types if len(set(types)) > 1 else types[0]


def stored(folder):
    """The configuration and the tensors that ``save_pretrained`` has written."""
    arrays = {}
    for file in folder.glob("*.safetensors"):
        arrays |= safetensors_numpy.load_file(file)
    return json.loads((folder / "config.json").read_text("utf-8")), TensorsInMemory(arrays)


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request, tmp_path_factory):
    """A model, and what it was saved as, in several files."""
    model = model_of_torch(request.param)
    return model, *saved_and_read(model, tmp_path_factory.mktemp(request.param))


def saved_and_read(model, folder):
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return stored(folder)


@pytest.mark.parametrize(
    ("dtype", "use_layer_stack"), [("float32", False), ("bfloat16", True), ("bfloat16", False)]
)
def test_a_model_is_that_of_penzais_converter_to_the_bit(
    saved, dtype, use_layer_stack, tmp_path, monkeypatch
):
    model, config, reader = saved
    types = config.get("layer_types")
    if use_layer_stack and (config["model_type"] == "gemma3_text" or len(set(types or [0])) > 1):
        with pytest.raises(CheckpointMismatchError, match="differ in their attention"):
            converted_model(config, reader.tensors, use_layer_stack=True)
        return
    if dtype != "float32":
        model = copy.deepcopy(model).to(getattr(torch, dtype))
        config, reader = saved_and_read(model, tmp_path)
    options = {"use_layer_stack": use_layer_stack}
    ours = filled(*converted_model(config, reader.tensors, **options), reader)
    theirs = penzai_route(model, config, reader, monkeypatch, **options)
    if config["model_type"] != "gemma3_text":
        assert_same_models(ours, theirs)
        return
    # Penzai 0.2.5 has no third Gemma: its parameters are those of the second, and two norms more.
    ours, theirs = parameters(ours), parameters(theirs)
    for label, value in ours.items():
        if match := re.search(r"block_(\d+)/attention/(query|key)_norm/", label):
            name = f"model.layers.{match[1]}.self_attn.{match[2][0]}_norm.weight"
            assert value.tobytes() == (reader.arrays[name] + np.asarray(1, dtype)).tobytes()
        else:
            assert value.tobytes() == theirs.pop(label).tobytes(), label
    assert not theirs


def test_logits_are_those_of_torch_up_to_rounding(saved):
    model, config, reader = saved
    ours = logits(filled(*converted_model(config, reader.tensors), reader), TOKENS)
    theirs = logits_of_torch(model)
    assert_same_logits(ours, theirs)
