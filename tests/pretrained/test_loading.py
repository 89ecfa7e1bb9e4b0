"""Safetensors files become models on any mesh, or are refused with all that is wrong by name."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    PlanError,
    RuleTypeError,
)
from penzai_shard.pretrained.families import model_of_config
from penzai_shard.pretrained.loading import load_safetensors
from tests.checkpoints.safetensors_files import make_texts, write_parts, write_tensors
from tests.checkpoints.trees import numbers, params
from tests.pretrained.models import CONFIGS, draw_tensors

RULES = pzs.tensor_parallel("model")
SQUARE = np.arange(16, dtype="float32").reshape(4, 4)
WIDE = np.arange(32, dtype="float32").reshape(8, 4)


def write(folder, name, tensors=None, config=None):
    write_tensors(folder / "model.safetensors", draw_tensors(name) if tensors is None else tensors)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] if config is None else config))
    return folder


@pytest.fixture
def llama(tmp_path):
    return write(tmp_path, "llama")


def refused(error, function, *args, **options):
    with pytest.raises(error) as caught:
        function(*args, **options)
    return {problem.path: problem for problem in caught.value.problems}


# Penzai's models


@pytest.mark.parametrize("shape", [{"data": 4, "model": 2}, {"data": 1, "model": 8}])
@pytest.mark.parametrize(("name", "stacked"), [("llama", True), ("gpt_neox", False)])
def test_load_puts_each_part_where_the_plan_says(tmp_path, shape, name, stacked):
    write_parts(tmp_path, draw_tensors(name))
    mesh, options = pzs.make_mesh(shape), {"on_indivisible": "replicate"}
    model = load_safetensors(
        tmp_path, mesh, RULES, config=CONFIGS[name], use_layer_stack=stacked, **options
    )
    abstract = model_of_config(CONFIGS[name], dtype="float32", use_layer_stack=stacked)
    plan = pzs.make_plan(abstract, mesh, RULES, **options)
    assert any(leaf.sharding.spec != jax.P() for leaf in plan.leaves)
    for leaf, planned in zip(leaves_of(model), plan.leaves, strict=True):
        assert leaf.value.sharding == planned.sharding, leaf.path
    whole = load_safetensors(tmp_path, config=CONFIGS[name], use_layer_stack=stacked)
    assert params(model) == params(whole)
    # A plan in place of mesh and rules, and an index in place of the folder.
    index = tmp_path / "model.safetensors.index.json"
    options = {"config": CONFIGS[name], "use_layer_stack": stacked}
    planned = load_safetensors(index, plan=plan, **options)
    assert params(planned) == params(model)


def test_loaded_arrays_can_be_donated_and_the_model_is_called(llama):
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    rules = {"heads": "model", "vocabulary": "model"}
    model = pzs.jit_root().apply(load_safetensors(llama, mesh, rules))
    tokens = pz.nx.zeros({"batch": 4, "seq": 3}, jnp.int32)
    logits = model(tokens, token_positions=pz.nx.arange("seq", 3))
    assert np.isfinite(logits.unwrap("batch", "seq", "vocabulary")).all()

    arrays = [value.data_array for value in pzs.param_dict(model).values()]
    jax.jit(lambda arrays: [x + 1 for x in arrays], donate_argnums=0)(arrays)
    assert all(array.is_deleted() for array in arrays)


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float16", "float64", "float32"])
def test_load_casts_as_numpy_does(tmp_path, stored):
    tensors = {name: x.astype(stored) for name, x in draw_tensors("llama").items()}
    # Of several dtypes, or of one that Penzai has no models of.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float16")
    write(tmp_path, "llama", tensors)
    problems = refused(CheckpointMismatchError, load_safetensors, tmp_path)
    assert "dtype='bfloat16'" in problems[""].fix
    model = load_safetensors(tmp_path, dtype="bfloat16", upcast_activations=True)
    found = pzs.param_dict(model)["transformer/embedder.embeddings"]
    expected = tensors["model.embed_tokens.weight"].astype(jnp.bfloat16)
    assert numbers(found).tobytes() == expected.tobytes()
    assert {str(value.dtype) for value in pzs.param_dict(model).values()} == {"bfloat16"}
    assert model.metadata.activation_dtype == jnp.float32


def test_load_names_everything_that_does_not_fit_at_once(tmp_path):
    tensors = draw_tensors("llama")
    tensors["model.layers.0.rotary_emb.inv_freq"] = np.ones(4, "float32")
    load_safetensors(write(tmp_path, "llama", tensors))

    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(31, "float32")
    tensors["model.layers.1.mlp.up_proj.weight_scale"] = np.ones(1, "float32")
    write(tmp_path, "llama", tensors)
    problems = refused(CheckpointMismatchError, load_safetensors, tmp_path)
    assert {path: problem.kind for path, problem in problems.items()} == {
        "model.layers.1.mlp.up_proj.weight": "missing",
        "model.norm.weight": "sizes",
        "model.layers.1.mlp.up_proj.weight_scale": "extra",
    }
    assert "31" in problems["model.norm.weight"].what
    assert "[32]" in problems["model.norm.weight"].what
    problems = refused(CheckpointMismatchError, load_safetensors, tmp_path, allow=("extra",))
    assert "model.layers.1.mlp.up_proj.weight_scale" not in problems


@pytest.mark.parametrize(
    ("options", "error", "path", "fix"),
    [
        ({"names": {"a": "b"}}, RuleTypeError, "into", "Give a model"),
        ({"axes": {"a": ("b",)}}, RuleTypeError, "into", "Give a model"),
        ({"others": "keep"}, RuleTypeError, "into", "Give a model"),
        ({"into": {"w": SQUARE}, "vocabulary": 48}, RuleTypeError, "into", "Leave"),
        ({"into": {"w": SQUARE}, "axes": ["w"]}, RuleTypeError, "axes", "axes={"),
        ({"dtype": "int8"}, RuleTypeError, "dtype", "dtype="),
        ({"dtype": "bf16"}, RuleTypeError, "dtype", "dtype="),
        ({"allow": "everything"}, RuleTypeError, "allow", "extra"),
        ({"config": {"model_type": "bert"}}, CheckpointMismatchError, "architectures", "into="),
        ({"mesh": {"model": 16}}, PlanError, "transformer/embedder.embeddings", ""),
    ],
)
def test_load_refuses_options(llama, options, error, path, fix):
    if "mesh" in options:
        options = {"mesh": pzs.make_mesh({"model": 3}, jax.devices()[:3]), "rules": RULES}
    problems = refused(error, load_safetensors, llama, **options)
    assert path in problems
    assert fix in problems[path].fix


def test_load_says_what_is_at_the_path(tmp_path):
    write_tensors(tmp_path / "model.safetensors", draw_tensors("llama"))
    (problem,) = refused(CheckpointNotFoundError, load_safetensors, tmp_path).values()
    assert "config.json" in problem.what
    refused(CheckpointNotFoundError, load_safetensors, tmp_path / "elsewhere")


# Models of one's own


def test_into_gets_order_from_lengths_and_names_by_pattern(tmp_path):
    tensors = {f"layers.{i}.weight": WIDE + i for i in range(2)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    model = {f"block_{i}": {"w": pz.nx.zeros({"in": 4, "out": 8})} for i in range(2)}
    load = functools.partial(
        load_safetensors, tmp_path, into=model, names={"layers.*.weight": "block_*/w"}
    )
    problems = refused(CheckpointMismatchError, load)
    assert {problem.kind for problem in problems.values()} == {"transpose"}
    mesh = pzs.make_mesh({"x": 8})
    loaded = load(mesh=mesh, rules={"out": "x"}, allow="transpose", dtype="bfloat16")
    for i in range(2):
        array = loaded[f"block_{i}"]["w"]
        assert array.data_array.sharding.spec == jax.P(None, "x")
        expected = (WIDE + i).T.astype(jnp.bfloat16)
        assert numbers(array).tobytes() == expected.tobytes()


def test_into_stacks_blocks(tmp_path):
    tensors = {f"layers/block_{i}/w": WIDE + i for i in range(3)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    model = {"layers/blocks/w": pz.nx.zeros({"in": 4, "blocks": 3, "out": 8})}
    loaded = load_safetensors(tmp_path, into=model, allow=("blocks", "transpose"))
    expected = np.stack([tensors[f"layers/block_{i}/w"].T for i in range(3)], 1)
    np.testing.assert_array_equal(numbers(loaded["layers/blocks/w"]), expected)


def test_into_refuses_orders_that_nothing_tells(tmp_path):
    tensors = {"layers.0.w": SQUARE, "layers.1.w": SQUARE, "one": np.ones((1, 4, 1), "float32")}
    write_tensors(tmp_path / "model.safetensors", tensors)
    model = {name: pz.nx.zeros({"in": 4, "out": 4}) for name in ("layers.0.w", "layers.1.w")}
    model["one"] = pz.nx.zeros({"in": 4, "out": 1, "more": 1})
    load = functools.partial(load_safetensors, tmp_path, into=model, allow="transpose")
    problems = refused(CheckpointMismatchError, load)
    assert problems.keys() == {"layers.0.w", "layers.1.w"}
    # The fix that is given, and the other order.
    fix = "axes={'layers.*.w': ('in', 'out')}"
    assert all(fix in problem.fix for problem in problems.values())
    loaded = load(axes={"layers.*.w": ("in", "out")})
    np.testing.assert_array_equal(numbers(loaded["layers.0.w"]), SQUARE)
    loaded = load(axes={"layers.0.*": ("out", "in"), "layers.*.w": ("in", "out")})
    np.testing.assert_array_equal(numbers(loaded["layers.0.w"]), SQUARE.T)
    np.testing.assert_array_equal(numbers(loaded["layers.1.w"]), SQUARE)


@pytest.mark.parametrize(
    ("axes", "path", "fix"),
    [
        ({"w": ("in", "out", "more")}, "w", "each dimension"),
        ({"w": "in"}, "w", "each dimension"),
        ({"w": ("in", "neurons")}, "w", "rename_axes"),
        ({"v": ("in", "out")}, "", "'w'"),
    ],
)
def test_into_refuses_axes_that_are_not_those_of_the_tensors(tmp_path, axes, path, fix):
    texts = make_texts({"w": SQUARE}, {"w": ("in", "out")})
    write_tensors(tmp_path / "model.safetensors", {"w": SQUARE}, texts)
    model = {"w": pz.nx.zeros({"in": 4, "out": 4})}
    problems = refused(CheckpointMismatchError, load_safetensors, tmp_path, into=model, axes=axes)
    assert fix in problems[path].fix
    loaded = load_safetensors(tmp_path, into=model)
    np.testing.assert_array_equal(numbers(loaded["w"]), SQUARE)


def test_into_keeps_what_is_not_stored_and_takes_models_of_equinox(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"linear.weight": WIDE})
    model = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    load = functools.partial(load_safetensors, tmp_path, names={"linear.*": "*"}, into=model)
    with pytest.warns(pzs.ShardingWarning, match="no logical axis names"):
        loaded = load(others="keep")
    np.testing.assert_array_equal(loaded.weight, WIDE)
    np.testing.assert_array_equal(loaded.bias, model.bias)
    assert refused(CheckpointMismatchError, load).keys() == {"bias"}
