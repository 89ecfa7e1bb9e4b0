"""Models go into safetensors files that others read, as a whole or not at all."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from safetensors import safe_open
from safetensors.numpy import load_file

import penzai_shard as pzs
from penzai_shard.checkpoints.replacement import Replacement
from penzai_shard.checkpoints.reports import verify_checkpoint
from penzai_shard.errors import (
    CheckpointMismatchError,
    CheckpointWriteError,
    RuleTypeError,
    ShardingError,
)
from penzai_shard.pretrained.families import model_of_config
from penzai_shard.pretrained.loading import load_safetensors
from penzai_shard.pretrained.saving import save_safetensors
from tests.checkpoints.safetensors_files import write_tensors
from tests.checkpoints.trees import blank, numbers, params
from tests.pretrained.models import CONFIGS, draw_tensors

MESH = pzs.make_mesh({"data": 4, "model": 2})
WINDOW = pz.nn.ApplyCausalSlidingWindowAttentionMask
OWN = {
    "up": pz.nx.wrap(jnp.arange(32.0).reshape(4, 8)).tag("embedding", "neurons"),
    "count": jnp.arange(3),
    "half": pz.nx.wrap(jnp.arange(8, dtype="bfloat16")).tag("neurons"),
    "empty": jnp.zeros((0, 3)),
    "one": jnp.float32(2.5),
    "flag": jnp.array([True, False]),
}


def refused(error, function, *args, **options):
    with pytest.raises(error) as caught:
        function(*args, **options)
    return {problem.path: problem for problem in caught.value.problems}


def load_llama(folder, name="llama", **options):
    folder.mkdir()
    write_tensors(folder / "model.safetensors", draw_tensors(name))
    return load_safetensors(folder, **{"config": CONFIGS[name], **options})


# Models of one's own


def test_own_paths_come_back_with_their_axes(tmp_path):
    rules, free = {"neurons": "model", "embedding": "data"}, {"on_unnamed": "replicate"}
    model = pzs.place(OWN, MESH, rules, **free)
    path = save_safetensors(tmp_path / "saved", model)
    assert path == str(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: x.tobytes() for name, x in stored.items()} == {
        name: numbers(x).tobytes() for name, x in OWN.items()
    }
    assert verify_checkpoint(path).ok
    turned = blank(OWN) | {"up": pz.nx.zeros({"neurons": 8, "embedding": 4})}
    for loaded in (
        load_safetensors(path, MESH, rules, into=turned, allow="transpose", **free),
        pzs.restore_params(path, turned, MESH, rules, allow="transpose", **free),
    ):
        assert params(loaded) == params(OWN) | params(
            {"up": OWN["up"].order_as("neurons", "embedding")}
        )


def test_names_are_given_by_pattern(tmp_path):
    model = {f"block_{i}": {"w": jnp.full(3, i), "b": jnp.zeros(2)} for i in range(2)}
    names = {"block_*/w": "layers.*.weight", "block_*/b": None}
    path = save_safetensors(tmp_path / "saved", model, names=names)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: x[0] for name, x in stored.items()} == {
        "layers.0.weight": 0,
        "layers.1.weight": 1,
    }
    wanted = {f"block_{i}": {"w": jnp.zeros(3, int)} for i in range(2)}
    loaded = load_safetensors(path, into=wanted, names={"layers.*.weight": "block_*/w"})
    np.testing.assert_array_equal(loaded["block_1"]["w"], model["block_1"]["w"])
    for wrong in ({"block_?/w": "w"}, {"block_*/c": "*"}, {"block_1/w": "block_0/w"}):
        refused(CheckpointMismatchError, save_safetensors, tmp_path / "no", model, names=wrong)
    assert not (tmp_path / "no").exists()


def test_files_are_as_large_as_asked_for(tmp_path):
    model = {f"w{i}": jnp.full((16, size), i, "float32") for i, size in enumerate((4, 4, 9, 1, 2))}
    path = save_safetensors(tmp_path / "saved", model, max_file_bytes=512)
    folder = tmp_path / "saved"
    homes = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    start, end = "model-0000", "-of-00003.safetensors"
    assert homes == {
        name: f"{start}{i}{end}" for name, i in zip(sorted(model), (1, 1, 2, 3, 3), strict=True)
    }
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            assert opened.metadata()["format"] == "pt"
            assert {*opened.keys()} == {name for name in homes if homes[name] == file.name}
    assert params(load_safetensors(path, into=blank(model))) == params(model)


def test_dtype_casts_numbers_with_a_fraction(tmp_path):
    path = save_safetensors(tmp_path / "saved", OWN, dtype="bfloat16")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored["up"].tobytes() == numbers(OWN["up"]).astype("bfloat16").tobytes()
    assert stored["count"].dtype == np.int32
    loaded = load_safetensors(path, into=OWN, allow="cast")
    np.testing.assert_array_equal(numbers(loaded["up"]), numbers(OWN["up"]))


def test_a_copied_configuration_says_the_dtype_of_the_tensors(tmp_path):
    config = {**CONFIGS["llama"], "torch_dtype": "float32"}
    model = load_llama(tmp_path / "source", config=config)
    for name, dtype in [("kept", None), ("cast", "bfloat16")]:
        path = save_safetensors(tmp_path / name, model, config=config, dtype=dtype)
        said = json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"]
        assert {x.dtype.name for x in load_file(f"{path}/model.safetensors").values()} == {said}


def test_saving_holds_one_tensor_in_host_memory(tmp_path):
    model = {f"w{i}": pz.nx.ones({"embedding": 1024, "neurons": 1024}) for i in range(6)}
    model = pzs.place(model, MESH, {"neurons": "model", "embedding": "data"})
    tracemalloc.start()
    save_safetensors(tmp_path / "saved", model)
    kept, peak = (size / 2**20 for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    # JAX lets go of the last one with its next operation.
    assert kept < 1.5 * 4
    assert peak < 4 * 4


def test_several_processes_are_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    problems = refused(ShardingError, save_safetensors, tmp_path / "saved", OWN)
    assert "save_params" in problems[""].fix


# The folder


def test_only_weights_are_replaced_and_only_if_asked_for(tmp_path):
    folder = tmp_path / "saved"
    save_safetensors(folder, {"w": jnp.zeros(3)}, max_file_bytes=1)
    problems = refused(CheckpointWriteError, save_safetensors, folder, OWN)
    assert "overwrite=True" in problems[str(folder)].fix
    save_safetensors(folder, OWN, overwrite=True)
    assert params(load_safetensors(folder, into=blank(OWN))) == params(OWN)
    (folder / "tokenizer.json").touch()
    refused(CheckpointWriteError, save_safetensors, folder, OWN, overwrite=True)
    checkpoint = pzs.save_params(tmp_path / "checkpoint", OWN)
    refused(CheckpointWriteError, save_safetensors, checkpoint, OWN, overwrite=True)


@pytest.mark.parametrize("stopped_by", [OSError(28, "no space"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, stopped_by):
    folder = tmp_path / "saved"
    save_safetensors(folder, OWN)

    def commit(self):
        assert (self.new / "model.safetensors").exists()
        raise stopped_by

    monkeypatch.setattr(Replacement, "commit", commit)
    expected = CheckpointWriteError if isinstance(stopped_by, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save_safetensors(folder, {"w": jnp.zeros(3)}, overwrite=True)
    monkeypatch.undo()
    assert [*tmp_path.iterdir()] == [folder]
    assert params(load_safetensors(folder, into=blank(OWN))) == params(OWN)


@pytest.mark.parametrize(
    ("model", "options", "error", "path"),
    [
        (OWN, {"config": CONFIGS["llama"], "names": {"up": "w"}}, RuleTypeError, "names"),
        (OWN, {"dtype": "int8"}, RuleTypeError, "dtype"),
        (OWN, {"dtype": "bf16"}, RuleTypeError, "dtype"),
        ({"key": jax.random.key(0)}, {}, RuleTypeError, "key"),
        ({"w": jax.ShapeDtypeStruct((3,), "float32")}, {}, ShardingError, "w"),
    ],
)
def test_save_refuses_what_it_cannot_write(tmp_path, model, options, error, path):
    assert path in refused(error, save_safetensors, tmp_path / "saved", model, **options)
    assert not [*tmp_path.iterdir()]


# Penzai's models


def test_tokens_that_were_added_are_zeros_and_are_cut_off(tmp_path):
    mesh, rules = pzs.make_mesh({"model": 8}), {"vocabulary": "model"}
    model = load_llama(tmp_path / "source", mesh=mesh, rules=rules, vocabulary=48)
    for path in ("transformer/embedder.embeddings", "transformer/lm_head.weights"):
        added = pzs.param_dict(model)[path].unwrap("vocabulary", "embedding")[40:]
        np.testing.assert_array_equal(added, np.zeros((8, 32)))
    path = save_safetensors(tmp_path / "saved", model, config=CONFIGS["llama"])
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    for name, tensor in draw_tensors("llama").items():
        assert stored[name].tobytes() == tensor.tobytes(), name
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["vocab_size"] == 40
    assert params(load_safetensors(path, mesh, rules, vocabulary=48)) == params(model)


def test_embeddings_that_are_no_longer_tied_are_not_saved_as_tied(tmp_path):
    tied = CONFIGS["llama"] | {"tie_word_embeddings": True}
    # It has an output layer of its own, which counts.
    model = load_llama(tmp_path / "source", config=tied)
    saved = tmp_path / "saved"
    problems = refused(CheckpointMismatchError, save_safetensors, saved, model, config=tied)
    assert "tie_word_embeddings=False" in problems["lm_head.weight"].fix
    untied = dict(tied, tie_word_embeddings=False)
    path = save_safetensors(saved, model, config=untied)
    assert params(load_safetensors(path)) == params(model)
    stored = load_file(saved / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(stored, draw_tensors("llama")["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "changed", "path"),
    [
        ("llama_one_key_head", {"rope_theta": 1e4}, "ApplyRoPE.max_wavelength"),
        ("llama", {"rms_norm_eps": 1e-2}, "RMSStandardize.epsilon"),
        ("mistral", {"sliding_window": 7}, f"{WINDOW.__name__}.sliding_window_size"),
        ("gemma2_alike", {"attn_logit_softcapping": 20.0}, "TanhSoftCap.soft_cap"),
        ("gemma2_alike", {"query_pre_attn_scalar": 99}, "ConstantRescale.by"),
        ("gpt_neox", {"layer_norm_eps": 1e-2}, "Standardize.epsilon"),
        (
            "llama_one_key_head",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "ApplyScaledRoPE.factor",
        ),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_configuration_that_computes_otherwise_is_refused(tmp_path, name, changed, path, stacked):
    model = load_llama(tmp_path / "source", name, use_layer_stack=stacked)
    saved, config = tmp_path / "saved", CONFIGS[name]
    problems = refused(
        CheckpointMismatchError, save_safetensors, saved, model, config=config | changed
    )
    assert [*problems] == [path]
    save_safetensors(saved, pzs.jit_root().apply(model), config=config)


def test_a_model_of_another_configuration_is_refused_with_all_that_differs(tmp_path):
    model = load_llama(tmp_path / "source")
    config = CONFIGS["llama"] | {"intermediate_size": 50, "num_hidden_layers": 1}
    saved = tmp_path / "saved"
    problems = refused(CheckpointMismatchError, save_safetensors, saved, model, config=config)
    blocks = {path for path in pzs.param_dict(model) if "block_1/" in path}
    linear = {f"transformer/block_0/mlp/{x}_linear.weights" for x in ("gating", "value", "out")}
    assert problems.keys() == blocks | linear
    problems = refused(CheckpointMismatchError, save_safetensors, saved, OWN, config=config)
    assert {"up", "transformer/lm_head.weights"} < problems.keys()
    abstract = model_of_config(CONFIGS["llama"])
    refused(ShardingError, save_safetensors, saved, abstract, config=CONFIGS["llama"])
    assert not saved.exists()
