"""Models go into safetensors files that others read, as a whole or not at all."""

import json
import sys
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
from penzai_shard.pretrained import model_of_config
from tests.checkpoints.trees import blank, numbers, params
from tests.fitting.test_fit import Terminal
from tests.pretrained.models import CONFIGS, write_model
from tests.refusals import refused

MESH = pzs.make_mesh({"data": 4, "model": 2})
OWN = {
    "up": pz.nx.wrap(jnp.arange(32.0).reshape(4, 8)).tag("embedding", "neurons"),
    "count": jnp.arange(3),
    "half": pz.nx.wrap(jnp.arange(8, dtype="bfloat16")).tag("neurons"),
    "empty": jnp.zeros((0, 3)),
    "one": jnp.float32(2.5),
    "flag": jnp.array([True, False]),
}
LLAMA, LINEAR = CONFIGS["llama"], {"rope_type": "linear", "factor": 2.0}
NUMBERS = jnp.ones((1024, 1024))
FILE = "model.safetensors"
load, save = pzs.load_safetensors, pzs.save_safetensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("weights")))


# Models of one's own


def test_own_paths_come_back_with_their_axes(tmp_path):
    rules, free = {"neurons": "model", "embedding": "data"}, {"on_unnamed": "replicate"}
    path = save(tmp_path / "saved", pzs.place(OWN, MESH, rules, **free))
    assert path == str(tmp_path / "saved")
    stored = {name: x.tobytes() for name, x in load_file(tmp_path / "saved" / FILE).items()}
    assert stored == {name: numbers(x).tobytes() for name, x in OWN.items()}
    assert pzs.verify_checkpoint(path).ok
    turned = blank(OWN) | {"up": pz.nx.zeros({"neurons": 8, "embedding": 4})}
    expected = params(OWN | {"up": OWN["up"].order_as("neurons", "embedding")})
    for loaded in (
        load(path, MESH, rules, into=turned, allow="transpose", **free),
        pzs.restore_params(path, turned, MESH, rules, allow="transpose", **free),
    ):
        assert params(loaded) == expected


def test_files_are_as_large_as_asked_for(tmp_path):
    model = {f"w{i}": jnp.full((16, size), i, "float32") for i, size in enumerate((4, 4, 9, 1, 2))}
    folder = tmp_path / "saved"
    path = save(folder, model, max_file_bytes=512)
    homes = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 1, 2, 3, 3)]
    assert homes == dict(zip(sorted(model), files, strict=True))
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            assert opened.metadata()["format"] == "pt"
            assert {*opened.keys()} == {name for name in homes if homes[name] == file.name}
    assert params(load(path, into=blank(model))) == params(model)


def test_names_are_given_by_pattern(tmp_path):
    model = {f"block_{i}": {"w": jnp.full(3, i), "b": jnp.zeros(2)} for i in range(2)}
    names = {"block_*/w": "layers.*.weight", "block_*/b": None}
    save(tmp_path / "saved", model, names=names)
    stored = {name: x[0] for name, x in load_file(tmp_path / "saved" / FILE).items()}
    assert stored == {"layers.0.weight": 0, "layers.1.weight": 1}
    for wrong in ({"block_?/w": "w"}, {"block_*/c": "*"}, {"block_1/w": "block_0/w"}):
        refused(pzs.CheckpointMismatchError, save, tmp_path / "no", model, names=wrong)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("progress", "is_drawn"), [(None, True), (False, False)])
def test_a_terminal_shows_bytes(tmp_path, monkeypatch, progress, is_drawn):
    monkeypatch.setattr(sys, "stderr", Terminal())
    path = save(tmp_path / "saved", {"w": NUMBERS}, progress=progress)
    assert ("4.2/4.2 MB" in sys.stderr.getvalue()) == is_drawn
    for call in (load, {"into": {"w": NUMBERS}}), (pzs.verify_checkpoint, {}):
        monkeypatch.setattr(sys, "stderr", Terminal())
        call[0](path, progress=progress, **call[1])
        assert ("4.2/4.2 MB" in sys.stderr.getvalue()) == is_drawn


def test_dtype_casts_numbers_with_a_fraction(tmp_path):
    path = save(tmp_path / "saved", OWN, dtype=jnp.bfloat16)
    stored = load_file(tmp_path / "saved" / FILE)
    assert stored["up"].tobytes() == numbers(OWN["up"]).astype("bfloat16").tobytes()
    assert stored["count"].dtype == np.int32
    loaded = load(path, into=OWN, allow="cast")
    np.testing.assert_array_equal(numbers(loaded["up"]), numbers(OWN["up"]))


def test_saving_holds_few_tensors_in_host_memory(tmp_path):
    model = {f"w{i}": pz.nx.ones({"embedding": 1024, "neurons": 1024}) for i in range(12)}
    model = pzs.place(model, MESH, {"neurons": "model", "embedding": "data"})
    tracemalloc.start()
    save(tmp_path / "saved", model)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Of 12 tensors three are held at once; JAX lets go of some later.
    assert peak < 6 * 4 * 2**20


def test_several_processes_and_swapped_arguments_are_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    (several,) = refused(pzs.RuleTypeError, save, tmp_path / "saved", OWN).values()
    assert "save_params" in several.fix
    (swapped,) = refused(pzs.RuleTypeError, save, OWN, str(tmp_path)).values()
    assert "this dict is no path" in swapped.what


# The folder


def test_only_weights_are_replaced_and_only_if_asked_for(tmp_path):
    folder = tmp_path / "saved"
    save(folder, {"w": jnp.zeros(3)}, max_file_bytes=1)
    problems = refused(pzs.CheckpointWriteError, save, folder, OWN)
    assert "overwrite=True" in problems[str(folder)].fix
    save(folder, OWN, overwrite=True)
    assert params(load(folder, into=blank(OWN))) == params(OWN)
    (folder / "tokenizer.json").touch()
    refused(pzs.CheckpointWriteError, save, folder, OWN, overwrite=True)
    checkpoint = pzs.save_params(tmp_path / "checkpoint", OWN)
    refused(pzs.CheckpointWriteError, save, checkpoint, OWN, overwrite=True)


@pytest.mark.parametrize("stopped_by", [OSError(28, "no space"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, stopped_by):
    folder = tmp_path / "saved"
    save(folder, OWN)

    def commit(self):
        assert (self.new / FILE).exists()
        raise stopped_by

    monkeypatch.setattr(Replacement, "commit", commit)
    expected = pzs.CheckpointWriteError if isinstance(stopped_by, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save(folder, {"w": jnp.zeros(3)}, overwrite=True)
    monkeypatch.undo()
    assert [*tmp_path.iterdir()] == [folder]
    assert params(load(folder, into=blank(OWN))) == params(OWN)


@pytest.mark.parametrize(
    ("model", "options", "error", "fixes"),
    [
        (
            OWN,
            {"dtype": "int8", "max_file_bytes": "5GB", "names": {"up": 3}},
            pzs.RuleTypeError,
            {"dtype": "dtype=", "max_file_bytes": "Write 5", "names": "names="},
        ),
        (OWN, {"config": LLAMA, "names": {"up": "w"}}, pzs.RuleTypeError, {"config": "without"}),
        (OWN, {"max_file_bytes": 0}, pzs.RuleTypeError, {"max_file_bytes": "Write 5"}),
        ({"key": jax.random.key(0)}, {}, pzs.RuleTypeError, {"key": "names="}),
        ({"w": jax.ShapeDtypeStruct((3,), "int8")}, {}, pzs.ShardingError, {"w": "sharded_init"}),
    ],
)
def test_save_refuses_what_it_cannot_write(tmp_path, model, options, error, fixes):
    problems = refused(error, save, tmp_path / "saved", model, **options)
    assert problems.keys() == fixes.keys()
    assert all(fix in problems[path].fix for path, fix in fixes.items())
    assert not [*tmp_path.iterdir()]


# Penzai's models


def test_a_copied_configuration_says_the_dtype_of_the_tensors(tmp_path, llama):
    for name, dtype in [("kept", None), ("cast", "bfloat16")]:
        save(tmp_path / name, llama, config={**LLAMA, "dtype": "float32"}, dtype=dtype)
        said = json.loads((tmp_path / name / "config.json").read_text())["dtype"]
        assert {x.dtype.name for x in load_file(tmp_path / name / FILE).values()} == {said}


def test_embeddings_that_are_no_longer_tied_are_not_saved_as_tied(tmp_path, llama):
    tied = LLAMA | {"tie_word_embeddings": True}
    problems = refused(pzs.CheckpointMismatchError, save, tmp_path / "saved", llama, config=tied)
    assert [*problems] == ["lm_head.weight"]
    assert "tie_word_embeddings=False" in problems["lm_head.weight"].fix


# Also where blocks are stacked, and layers wrapped.
@pytest.mark.parametrize(
    ("name", "stacked", "changed", "path"),
    [
        ("llama_one_key_head", False, {"rope_theta": 1e4}, "ApplyRoPE.max_wavelength"),
        ("llama", True, {"rms_norm_eps": 1e-2}, "RMSStandardize.epsilon"),
        ("mistral", True, {"sliding_window": 7}, "SlidingWindowAttentionMask.sliding_window_size"),
        ("gemma2_alike", True, {"attn_logit_softcapping": 20.0}, "TanhSoftCap.soft_cap"),
        ("gemma2_alike", False, {"query_pre_attn_scalar": 99}, "ConstantRescale.by"),
        ("gpt_neox", False, {"layer_norm_eps": 1e-2}, "Standardize.epsilon"),
        ("llama", True, {"rope_parameters": LINEAR}, "ApplyScaledRoPE.factor"),
    ],
)
def test_a_configuration_that_computes_otherwise_is_refused(tmp_path, name, stacked, changed, path):
    abstract = model_of_config(CONFIGS[name], dtype="float32", use_layer_stack=stacked)
    zeros = {
        key: pz.nx.wrap(np.zeros([*x.named_shape.values()], "float32"), *x.named_shape)
        for key, x in pzs.param_dict(abstract).items()
    }
    model = pzs.jit_root().apply(pzs.with_params(abstract, zeros))
    options = {"config": CONFIGS[name] | changed}
    (found,) = refused(pzs.CheckpointMismatchError, save, tmp_path / "saved", model, **options)
    assert found.endswith(path)


def test_a_model_of_another_configuration_is_refused_with_all_that_differs(tmp_path, llama):
    config, saved = LLAMA | {"intermediate_size": 50, "num_hidden_layers": 1}, tmp_path / "saved"
    problems = refused(pzs.CheckpointMismatchError, save, saved, llama, config=config)
    blocks = {path for path in pzs.param_dict(llama) if "block_1/" in path}
    linear = {f"transformer/block_0/mlp/{x}_linear.weights" for x in ("gating", "value", "out")}
    assert problems.keys() == blocks | linear
    problems = refused(pzs.CheckpointMismatchError, save, saved, OWN, config=config)
    assert {"up", "transformer/lm_head.weights"} < problems.keys()
    refused(pzs.ShardingError, save, saved, model_of_config(LLAMA), config=LLAMA)
    assert not saved.exists()
