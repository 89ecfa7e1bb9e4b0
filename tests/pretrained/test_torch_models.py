"""Models of transformers come out as by way of torch and Penzai's converters, to the bit."""

import dataclasses
import json

import numpy as np
import pytest
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

from penzai_shard.pretrained.conversion import converted_model
from tests.pretrained.hugging_face_models import MODELS, TOKENS, logits_of_torch, model_of_torch
from tests.pretrained.penzai_models import assert_same_models, filled, logits
from tests.pretrained.tensors_in_memory import TensorsInMemory

_ABSENT = "{0} is not installed: pip install 'penzai-shard[torch]'"
torch = pytest.importorskip("torch", reason=_ABSENT.format("torch"))
pytest.importorskip("transformers", reason=_ABSENT.format("transformers"))
safetensors_numpy = pytest.importorskip("safetensors.numpy", reason=_ABSENT.format("safetensors"))

# torch and XLA sum in another order. In units of a rounding of the greatest logit; seen: at most 3.
ROUNDINGS = 12


def penzai_route(name, model, monkeypatch, **options):
    """Penzai's model of torch's, by the converter that Penzai has for it.

    transformers 5 says elsewhere what the converters look for, and more; so they are shown the
    configuration of before.
    """
    config = model.config
    rotary = config.rope_parameters
    if not name.startswith("gpt_neox"):
        config.rope_theta = rotary["rope_theta"]
        return llamalike_common.llamalike_from_huggingface_model(model, **options)
    config.rotary_emb_base = rotary["rope_theta"]
    config.rotary_pct = rotary["partial_rotary_factor"]
    monkeypatch.setattr(type(config), "to_dict", lambda self: {})
    state = model.state_dict()
    state["embed_out.weight"] = state.pop("lm_head.weight")
    monkeypatch.setattr(model, "state_dict", lambda: state)
    converted = gpt_neox.gpt_neox_from_huggingface_model(model, **options)
    # Penzai leaves the last norm its default, whatever the configuration says.
    norms = pz.select(converted).at_instances_of(pz.nn.Standardize)
    return norms.apply(lambda norm: dataclasses.replace(norm, epsilon=config.layer_norm_eps))


def stored(folder):
    """The configuration and the tensors that ``save_pretrained`` has written."""
    arrays = {}
    for file in folder.glob("*.safetensors"):
        arrays |= safetensors_numpy.load_file(file)
    return json.loads((folder / "config.json").read_text("utf-8")), TensorsInMemory(arrays)


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = model_of_torch(request.param)
    model.save_pretrained(folder, max_shard_size="20KB")
    return request.param, model, *stored(folder)


@pytest.mark.parametrize("use_layer_stack", [False, True])
def test_a_model_is_that_of_penzais_converter_to_the_bit(saved, use_layer_stack, monkeypatch):
    name, model, config, reader = saved
    options = {"use_layer_stack": use_layer_stack}
    ours = filled(*converted_model(config, reader.tensors, **options), reader)
    assert_same_models(ours, penzai_route(name, model, monkeypatch, **options))


def test_logits_are_those_of_torch_up_to_rounding(saved):
    _, model, config, reader = saved
    ours = logits(filled(*converted_model(config, reader.tensors), reader), TOKENS)
    theirs = logits_of_torch(model)
    unit = np.finfo(np.float32).eps * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDINGS * unit)
