"""Models compute what torch computed, and weights go out as they came, to the bit."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from safetensors.numpy import load_file

import penzai_shard as pzs
from penzai_shard.pretrained.families import FAMILIES
from penzai_shard.pretrained.model_configs import read_config
from tests.checkpoints.trees import params
from tests.pretrained.models import CONFIGS, REFERENCE, draw_tensors, write_model

MESH = pzs.make_mesh({"data": 4, "model": 2})
READ = {name: read_config(config) for name, config in CONFIGS.items()}
EVERY = [(name, False) for name in CONFIGS]
EVERY += [
    (name, True)
    for name, config in READ.items()
    if FAMILIES[config.family].can_stack and len({*config.layers}) == 1
]


@pytest.fixture(scope="module", params=EVERY, ids=lambda p: "-".join(map(str, p)))
def weights(request, tmp_path_factory):
    """A folder as Hugging Face has it, and the model that is loaded from it."""
    name, stacked = request.param
    drawn = draw_tensors(name, "bfloat16" if stacked else "float32")
    # One plus these is exact. In other numbers of a norm, adding one rounds the last bits.
    tensors = {
        key: (np.round(x * 64) / 64 + 0).astype(x.dtype) if x.ndim == 1 else x
        for key, x in drawn.items()
    }
    folder = write_model(tmp_path_factory.mktemp("weights"), name, tensors, several=stacked)
    # What is extra is the tower of the model with images.
    options = {"use_layer_stack": stacked, "allow": "extra"}
    model = pzs.load_safetensors(folder, MESH, pzs.tensor_parallel("model"), **options)
    return types.SimpleNamespace(
        folder=folder, name=name, stacked=stacked, tensors=tensors, model=model
    )


def test_save_gives_the_tensors_of_the_source(weights, tmp_path):
    path = pzs.save_safetensors(tmp_path / "saved", weights.model, config=weights.folder)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    tensors = {key: x for key, x in weights.tensors.items() if not key.startswith("vision")}
    assert saved.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert saved[key].dtype == tensor.dtype, key
        assert saved[key].tobytes() == tensor.tobytes(), key
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == CONFIGS[weights.name]
    again = pzs.load_safetensors(path)
    # A stack has the blocks one after the other.
    assert params(pzs.move(again, weights.model, allow="blocks")) == params(weights.model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_loaded_is_saved_exactly_whatever_one_was_added_to(tmp_path, dtype):
    model = pzs.load_safetensors(write_model(tmp_path, "gemma", draw_tensors("gemma", dtype)))
    path = pzs.save_safetensors(tmp_path / "saved", model, config=CONFIGS["gemma"])
    assert params(pzs.load_safetensors(path)) == params(model)


def compute_logits(folder):
    model = pzs.load_safetensors(folder, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, 40, (2, 9))
    named = pz.nx.wrap(jnp.asarray(tokens)).tag("batch", "seq")
    unbound, frozen = pz.unbind_params(model, freeze=True)

    @jax.jit
    def run(frozen):
        model = pz.bind_variables(unbound, frozen)
        return model(named, token_positions=pz.nx.arange("seq", 9))

    return np.asarray(run(frozen).unwrap("batch", "seq", "vocabulary"))


def assert_logits(ours, theirs):
    # In roundings of the greatest logit; torch is up to 9 from its own float64.
    unit = np.finfo(np.float32).eps * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=24 * unit)


@pytest.mark.parametrize("folder", sorted(REFERENCE.glob("*/")), ids=lambda path: path.name)
def test_logits_are_those_that_torch_computed(folder):
    assert_logits(compute_logits(folder), np.load(folder / "logits.npy"))


def test_logits_with_one_key_head_are_those_with_equal_ones(tmp_path):
    tensors = draw_tensors("llama_one_key_head")
    one = write_model(tmp_path / "one", "llama_one_key_head", tensors)
    doubled = {k: np.tile(x, (2, 1)) if x.shape == (4, 16) else x for k, x in tensors.items()}
    two = write_model(tmp_path / "two", "llama", doubled)
    config = CONFIGS["llama_one_key_head"] | {"num_key_value_heads": 2}
    (two / "config.json").write_text(json.dumps(config))
    assert_logits(compute_logits(one), compute_logits(two))
