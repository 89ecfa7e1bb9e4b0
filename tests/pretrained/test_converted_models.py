"""Models of Hugging Face, from files that transformers 4 and 5 wrote, without torch."""

import json
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from penzai_shard.pretrained.conversion import converted_model
from tests.pretrained.hugging_face_models import TOKENS
from tests.pretrained.penzai_models import filled, logits
from tests.pretrained.reference.make_reference import CONFIG, FOLDER, KEPT
from tests.pretrained.tensors_in_memory import TensorsInMemory

# As for torch itself, in test_torch_models.
ROUNDINGS = 12


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
    unit = np.finfo(np.float32).eps * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDINGS * unit)


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


def with_shape(leaf):
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
