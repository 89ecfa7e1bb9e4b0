"""Safetensors files become models on any mesh, or are refused with all that is wrong by name."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.pretrained import model_of_config
from tests.checkpoints.safetensors_files import make_texts, write_one
from tests.checkpoints.trees import numbers, params
from tests.pretrained.models import CONFIGS, draw_tensors, write_model
from tests.refusals import refused

RULES = pzs.tensor_parallel("model")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
SQUARE = np.arange(16, dtype="float32").reshape(4, 4)
WIDE = np.arange(32, dtype="float32").reshape(8, 4)
load = pzs.load_safetensors
refuse = functools.partial(refused, pzs.CheckpointMismatchError, load)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("weights"))


# Penzai's models


@pytest.mark.parametrize(("name", "stacked", "split"), [("llama", True, 2), ("gpt_neox", False, 8)])
def test_load_puts_each_part_where_the_plan_says(tmp_path, name, stacked, split):
    write_model(tmp_path, name, several=True)
    mesh = pzs.make_mesh({"data": 8 // split, "model": split})
    options = {"on_indivisible": "replicate"}
    model = load(tmp_path, mesh, RULES, use_layer_stack=stacked, **options)
    abstract = model_of_config(tmp_path, dtype="float32", use_layer_stack=stacked)
    plan = pzs.make_plan(abstract, mesh, RULES, **options)
    assert any(leaf.sharding.spec != jax.P() for leaf in plan.leaves)
    for leaf, planned in zip(leaves_of(model), plan.leaves, strict=True):
        assert leaf.value.sharding == planned.sharding, leaf.path
    # A plan in place of mesh and rules, and an index in place of the folder.
    planned = load(tmp_path / "model.safetensors.index.json", plan=plan, use_layer_stack=stacked)
    assert params(planned) == params(model) == params(load(tmp_path, use_layer_stack=stacked))
    arrays = [value.data_array for value in pzs.param_dict(model).values()]
    jax.jit(lambda arrays: [x + 1 for x in arrays], donate_argnums=0)(arrays)
    assert all(array.is_deleted() for array in arrays)


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float16", "float64", "float32"])
def test_load_casts_as_numpy_does(tmp_path, stored):
    tensors = draw_tensors("llama", stored)
    # Of several dtypes, or of one that Penzai has no models of.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float16")
    write_model(tmp_path, tensors=tensors)
    problems = refused(pzs.RuleTypeError, load, tmp_path)
    assert "float16" in problems["dtype"].what
    assert "dtype='bfloat16'" in problems["dtype"].fix
    model = load(tmp_path, dtype="bfloat16", upcast_activations=True)
    found = pzs.param_dict(model)["transformer/embedder.embeddings"]
    assert numbers(found).tobytes() == tensors[TABLE].astype(jnp.bfloat16).tobytes()
    assert {str(value.dtype) for value in pzs.param_dict(model).values()} == {"bfloat16"}
    assert model.metadata.activation_dtype == jnp.float32


def test_load_names_everything_that_does_not_fit_at_once(tmp_path):
    tensors = draw_tensors("llama")
    tensors["model.layers.0.rotary_emb.inv_freq"] = np.ones(4, "float32")
    load(write_model(tmp_path, tensors=tensors))

    up = "model.layers.1.mlp.up_proj.weight"
    del tensors[up]
    tensors["model.norm.weight"] = np.ones(31, "float32")
    tensors[f"{up}_scale"] = np.ones(1, "float32")
    problems = refuse(write_model(tmp_path, tensors=tensors))
    kinds = {path: problem.kind for path, problem in problems.items()}
    assert kinds == {up: "missing", "model.norm.weight": "sizes", f"{up}_scale": "extra"}
    assert "31" in problems["model.norm.weight"].what
    assert "[16]" in problems["model.norm.weight"].what
    assert f"{up}_scale" not in refuse(tmp_path, allow=("extra",))


def test_load_compares_a_head_that_is_stored_though_it_is_tied(tmp_path):
    tensors = draw_tensors("llama_tied")
    model = load(write_model(tmp_path, "llama_tied", tensors))
    tensors[HEAD] = tensors[TABLE]
    assert params(load(write_model(tmp_path, "llama_tied", tensors))) == params(model)
    tensors[HEAD] = tensors[TABLE] + np.eye(40, 16, dtype="float32")
    problems = refuse(write_model(tmp_path, "llama_tied", tensors))
    assert {path: problem.kind for path, problem in problems.items()} == {HEAD: "tied"}
    assert "tie_word_embeddings=False" in problems[HEAD].fix
    load(tmp_path, config=CONFIGS["llama_tied"] | {"tie_word_embeddings": False})


@pytest.mark.parametrize(
    ("options", "fixes"),
    [
        ({"names": {"a": "b"}, "axes": {"a": ("b",)}}, {"names": "with into", "axes": "with into"}),
        ({"others": "keep", "allow": "casts"}, {"others": "with into", "allow": "allow='cast'"}),
        ({"into": {"w": SQUARE}, "use_layer_stack": True}, {"use_layer_stack": "without into"}),
        ({"into": {"w": SQUARE}, "axes": ["w"]}, {"axes": "axes={"}),
        ({"into": {"w": SQUARE}, "dtype": "int8", "names": 3}, {"dtype": "into=", "names": "="}),
        ({"dtype": "bf16", "verify": "no"}, {"dtype": "'bfloat16'", "verify": "verify="}),
    ],
)
def test_load_refuses_all_that_is_wrong_by_option(llama, options, fixes):
    problems = refused(pzs.RuleTypeError, load, llama, **options)
    assert problems.keys() == fixes.keys()
    assert all(fix in problems[path].fix for path, fix in fixes.items())


def test_load_says_what_is_at_the_path(tmp_path):
    write_one(tmp_path, draw_tensors("llama"))
    (problem,) = refused(pzs.CheckpointNotFoundError, load, tmp_path).values()
    assert "config.json" in problem.what
    refused(pzs.CheckpointNotFoundError, load, tmp_path / "elsewhere")
    (swapped,) = refused(pzs.RuleTypeError, load, pzs.make_mesh({"data": 8}), tmp_path).values()
    assert "this Mesh is no path" in swapped.what
    # What is no model of a configuration can be filled from any checkpoint.
    checkpoint = pzs.save_params(tmp_path / "checkpoint", {"w": SQUARE})
    (problem,) = refused(pzs.CheckpointNotFoundError, load, checkpoint).values()
    assert "config.json" in problem.what
    np.testing.assert_array_equal(load(checkpoint, into={"w": SQUARE * 0})["w"], SQUARE)


@pytest.mark.parametrize("options", [{}, {"mesh": pzs.make_mesh({"x": 8}), "rules": {}}])
def test_into_a_model_of_penzai_answers_names_of_hugging_face_with_move(llama, options):
    model = load(llama, **options)
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        load(llama, into=model, **options)
    (problem,) = caught.value.problems
    written = problem.fix.removeprefix("Write ").removesuffix(".")
    own = {"move": pzs.move, "load_safetensors": load, "model": model, **options}
    assert params(eval(written, own)) == params(model)


# Models of one's own


def test_into_gets_order_from_lengths_and_names_by_pattern(tmp_path):
    tensors = {f"layers.{i}.weight": WIDE + i for i in range(2)}
    write_one(tmp_path, tensors)
    model = {f"block_{i}": {"w": pz.nx.zeros({"in": 4, "out": 8})} for i in range(2)}
    options = {"into": model, "names": {"layers.*.weight": "block_*/w"}}
    assert {problem.kind for problem in refuse(tmp_path, **options).values()} == {"transpose"}
    options |= {"mesh": pzs.make_mesh({"x": 8}), "rules": {"out": "x"}}
    loaded = load(tmp_path, **options, allow="transpose")
    for i in range(2):
        array = loaded[f"block_{i}"]["w"]
        assert array.data_array.sharding.spec == jax.P(None, "x")
        assert numbers(array).tobytes() == (WIDE + i).T.tobytes()


def test_into_stacks_blocks(tmp_path):
    tensors = {f"layers/block_{i}/w": WIDE + i for i in range(3)}
    write_one(tmp_path, tensors)
    model = {"layers/blocks/w": pz.nx.zeros({"in": 4, "blocks": 3, "out": 8})}
    loaded = load(tmp_path, into=model, allow=("blocks", "transpose"))
    expected = np.stack([tensors[f"layers/block_{i}/w"].T for i in range(3)], 1)
    np.testing.assert_array_equal(numbers(loaded["layers/blocks/w"]), expected)


def test_into_refuses_orders_that_nothing_tells(tmp_path):
    tensors = {"layers.0.w": SQUARE, "layers.1.w": SQUARE, "one": np.ones((1, 4, 1), "float32")}
    write_one(tmp_path, tensors)
    model = {name: pz.nx.zeros({"in": 4, "out": 4}) for name in ("layers.0.w", "layers.1.w")}
    model["one"] = pz.nx.zeros({"in": 4, "out": 1, "more": 1})
    options = {"into": model, "allow": "transpose"}
    problems = refuse(tmp_path, **options)
    assert problems.keys() == {"layers.0.w", "layers.1.w"}
    # The fix that is given, and the other order.
    fix = "axes={'layers.*.w': ('in', 'out')}"
    assert all(fix in problem.fix for problem in problems.values())
    for axes, first in [({}, SQUARE), ({"layers.0.*": ("out", "in")}, SQUARE.T)]:
        loaded = load(tmp_path, **options, axes=axes | {"layers.*.w": ("in", "out")})
        np.testing.assert_array_equal(numbers(loaded["layers.0.w"]), first)
        np.testing.assert_array_equal(numbers(loaded["layers.1.w"]), SQUARE)


def test_into_refuses_axes_that_are_not_those_of_the_tensors(tmp_path):
    write_one(tmp_path, {"w": SQUARE}, make_texts({"w": SQUARE}, {"w": ("in", "out")}))
    model = {"w": pz.nx.zeros({"in": 4, "out": 4})}
    for axes, path, fix in [
        ({"w": ("in", "out", "more")}, "w", "each dimension"),
        ({"w": "in"}, "w", "each dimension"),
        ({"w": ("in", "neurons")}, "w", "rename_axes"),
        ({"v": ("in", "out")}, "", "'w'"),
    ]:
        assert fix in refuse(tmp_path, into=model, axes=axes)[path].fix
    np.testing.assert_array_equal(numbers(load(tmp_path, into=model)["w"]), SQUARE)


def test_into_keeps_what_is_not_stored_and_takes_models_of_equinox(tmp_path):
    write_one(tmp_path, {"linear.weight": WIDE})
    model = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    options = {"names": {"linear.*": "*"}, "into": model}
    with pytest.warns(pzs.ShardingWarning, match="no logical axis names"):
        loaded = load(tmp_path, **options, others="keep")
    np.testing.assert_array_equal(loaded.weight, WIDE)
    np.testing.assert_array_equal(loaded.bias, model.bias)
    assert refuse(tmp_path, **options).keys() == {"bias"}
