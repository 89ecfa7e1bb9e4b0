"""Models of Hugging Face, from files that transformers 4 and 5 wrote, without torch."""

import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from penzai import pz
from safetensors.numpy import load_file

from penzai_shard import (
    CheckpointMismatchError,
    PaddedArray,
    fully_sharded,
    load_safetensors,
    make_mesh,
    make_plan,
    param_dict,
)
from penzai_shard.pretrained.conversion import converted_model
from tests.pretrained.hugging_face_models import TOKENS
from tests.pretrained.penzai_models import assert_same_logits, assert_same_models, filled, logits
from tests.pretrained.reference.make_reference import CONFIG, FOLDER, KEPT
from tests.pretrained.tensors_in_memory import TensorsInMemory

MASKS = (pz.nn.ApplyCausalAttentionMask, pz.nn.ApplyCausalSlidingWindowAttentionMask)
GEMMA_3 = "gemma3_longer_texts"


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    """Importing torch or transformers fails."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)


def config_of(name, version=5):
    return json.loads((FOLDER / name / CONFIG.format(version)).read_text("utf-8"))


def reader_of(name):
    arrays = {}
    for file in sorted((FOLDER / name).glob("*.safetensors")):
        arrays |= load_file(file)
    return TensorsInMemory(arrays)


@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_that_torch_computed(name):
    reader = reader_of(name)
    model, views = converted_model(config_of(name), reader.tensors, dtype="float32")
    ours, theirs = (
        logits(filled(model, views, reader), TOKENS),
        np.load(FOLDER / name / "logits.npy"),
    )
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("name", KEPT)
def test_both_forms_of_a_configuration_make_the_same_model(name):
    reader = reader_of(name)
    models = [converted_model(config_of(name, v), reader.tensors)[0] for v in (4, 5)]
    structures = [str(jax.tree_util.tree_structure(model)) for model in models]
    assert structures[0] == structures[1]
    leaves = [jax.tree_util.tree_leaves(model) for model in models]
    assert all(
        (one.shape, one.dtype) == (other.shape, other.dtype)
        and (isinstance(one, jax.ShapeDtypeStruct) or bool((one == other).all()))
        for one, other in zip(*(map(with_shape, tree) for tree in leaves), strict=True)
    )


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


RULES = {"embedding": "data", "heads": "model", "neurons": "model", "vocabulary": "model"}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma", {"use_layer_stack": True, "dtype": "float32"}),
        ("gpt_neox", {}),
        (GEMMA_3, {"upcast_activations_to_float32": True}),
    ],
)
def test_a_directory_goes_straight_onto_a_mesh(name, version, options, mesh, tmp_path):
    folder = tmp_path / name
    shutil.copytree(FOLDER / name, folder)
    (folder / CONFIG.format(version)).rename(folder / "config.json")
    loaded = load_safetensors(folder, mesh, RULES, **options)
    reader = reader_of(name)
    model, views = converted_model(config_of(name, version), reader.tensors, **options)
    assert_same_models(loaded, filled(model, views, reader))
    plan = make_plan(model, mesh, RULES)
    placed = {leaf.path: leaf.sharding for leaf in make_plan(loaded, mesh, RULES).leaves}
    assert placed == {leaf.path: leaf.sharding for leaf in plan.leaves}
    _, parameters = pz.unbind_params(loaded)
    for parameter in parameters:
        array = parameter.value.data_array
        names = tuple(parameter.value.named_axes)
        parts = {"data": 4, "model": 2}
        wanted = [n // parts.get(RULES.get(a), 1) for a, n in zip(names, array.shape, strict=True)]
        assert list(array.addressable_shards[0].data.shape) == wanted, parameter.label


@pytest.mark.parametrize("name", ["gpt_neox", GEMMA_3])
def test_a_directory_goes_straight_into_padded_parameters(name, tmp_path):
    shutil.copytree(FOLDER / name, tmp_path / name)
    (tmp_path / name / CONFIG.format(5)).rename(tmp_path / name / "config.json")
    three = make_mesh({"data": 3}, jax.devices()[:3])
    loaded = load_safetensors(
        tmp_path / name, three, fully_sharded(min_size=1), on_indivisible="pad"
    )
    reader = reader_of(name)
    model, views = converted_model(config_of(name, 5), reader.tensors)
    expected = param_dict(filled(model, views, reader))
    stored = {v.label: v.value for v in pz.unbind_params(loaded, freeze=True)[1]}
    assert sum(isinstance(value, PaddedArray) for value in stored.values()) > len(stored) / 2
    for name, value in param_dict(loaded).items():
        np.testing.assert_array_equal(value.data_array, expected[name].data_array)
        if isinstance(stored[name], PaddedArray):
            behind = np.array(stored[name].stored)
            behind[tuple(map(slice, value.data_array.shape))] = 0
            assert not behind.any()


def with_images(name):
    """The configuration and the tensors of a model for images and text, of one for text."""
    text = {key: value for key, value in config_of(name).items() if key != "architectures"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 39,
        "mm_tokens_per_image": 4,
    }
    arrays = {f"language_model.{key}": array for key, array in reader_of(name).arrays.items()}
    return config, arrays | {"vision_tower.head.probe": np.zeros((1, 8), np.float32)}


def test_the_text_of_a_model_for_images_is_loaded_where_the_rest_may_be_left():
    config, arrays = with_images(GEMMA_3)
    reader, alone = TensorsInMemory(arrays), reader_of(GEMMA_3)
    with pytest.raises(CheckpointMismatchError, match=r"vision_tower\.head\.probe: in model\.safe"):
        converted_model(config, reader.tensors)
    model, views = converted_model(config, reader.tensors, on_extra="ignore")
    expected = filled(*converted_model(config_of(GEMMA_3), alone.tensors), alone)
    assert_same_models(filled(model, views, reader), expected)


def test_configurations_of_text_and_images_are_checked_both():
    config, arrays = with_images(GEMMA_3)
    tensors = TensorsInMemory(arrays).tensors
    for changes, message in (
        ({"fusion": "late"}, "fusion: is 'late', of which it is not known"),
        ({"text_config": None}, r"config.json['text_config']: is None, and has to be"),
        ({"text_config": {**config["text_config"], "head_dim": 7}}, "head_dim: is 7, and has"),
    ):
        with pytest.raises(CheckpointMismatchError, match=re.escape(message)):
            converted_model({**config, **changes}, tensors, on_extra="ignore")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("gemma2", {}), (GEMMA_3, {"sliding_window_pattern": 2}), (GEMMA_3, {})],
)
def test_layers_that_a_configuration_does_not_list_have_the_attention_of_their_family(
    name, pattern
):
    tensors, config = reader_of(name).tensors, config_of(name)
    listed = config.pop("layer_types")
    config = {key: value for key, value in config.items() if "pattern" not in key} | pattern
    if name == GEMMA_3 and not pattern:
        # Every sixth layer of a third Gemma attends to all, and so none of two.
        listed = ["sliding_attention"] * 2
    models = [converted_model(c, tensors)[0] for c in (config, {**config, "layer_types": listed})]
    structures = [str(jax.tree_util.tree_structure(model)) for model in models]
    assert structures[0] == structures[1]
    kinds = [type(m).__name__ for m in pz.select(models[0]).at_instances_of(MASKS).get_sequence()]
    assert ["Sliding" in kind for kind in kinds] == ["sliding" in kind for kind in listed]


def with_shape(leaf):
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
