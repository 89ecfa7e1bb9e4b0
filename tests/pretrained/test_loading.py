"""Weights from safetensors files onto a mesh: any model, every layout, nothing taken on trust."""

import io
import json
import math
import re

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from penzai import pz
from rich.console import Console
from safetensors.numpy import save_file

import penzai_shard as pzs
from penzai_shard import CheckpointMismatchError, load_safetensors
from penzai_shard.pretrained import filling
from penzai_shard.pretrained.byte_progress import ByteProgress
from penzai_shard.pretrained.tensor_views import WholeTensor
from tests.pretrained.tensors_in_memory import TensorsInMemory

RULES = {"neurons": "model", "embedding": "data"}
UP = np.arange(32, dtype=np.float32).reshape(4, 8)
SIZES = {"embedding": 4, "neurons": 8}


@pytest.fixture(scope="module")
def mesh():
    return pzs.make_mesh({"data": 4, "model": 2})


def file_of(directory, **weights):
    path = directory / "model.safetensors"
    save_file(
        {name.replace("__", "."): np.ascontiguousarray(w) for name, w in weights.items()}, path
    )
    return path


def struct(sizes, dtype="float32"):
    data = jax.ShapeDtypeStruct(tuple(sizes.values()), dtype)
    return pz.nx.NamedArray.wrap(jnp.zeros(data.shape, dtype)).tag(*sizes)


def mlp():
    return pz.nn.Affine.from_config("mlp", jax.random.key(0), {"embedding": 4}, {"neurons": 8})


def test_every_part_lands_on_its_device_as_the_plan_says(tmp_path, mesh):
    path = file_of(tmp_path, w=UP)
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    for onto in (mesh, explicit):
        for rules in (RULES, {"neurons": ("data", "model")}, {"embedding": "data"}, {}):
            loaded = load_safetensors(path, onto, rules, into={"w": struct(SIZES)})["w"].data_array
            plan = pzs.make_plan({"w": struct(SIZES)}, mesh, rules).leaves[0]
            assert loaded.sharding == plan.sharding
            for shard in loaded.addressable_shards:
                np.testing.assert_array_equal(shard.data, UP[shard.index])


def test_a_model_is_filled_and_a_given_plan_carried_out(tmp_path, mesh, monkeypatch):
    weights = {name: np.asarray(v.data_array) for name, v in pzs.param_dict(mlp()).items()}
    path = file_of(tmp_path, **weights)
    abstract = pzs.abstract_model(mlp)
    plan = pzs.make_plan(abstract, mesh, RULES)
    for model, bytes_of_small_parts in ((mlp(), filling._OWN_PAGES_BYTES), (abstract, 1)):
        monkeypatch.setattr(filling, "_OWN_PAGES_BYTES", bytes_of_small_parts)
        loaded = load_safetensors(path, plan, into=model)
        assert isinstance(loaded, pz.nn.Affine)
        for name, value in pzs.param_dict(loaded).items():
            np.testing.assert_array_equal(value.data_array, weights[name])
        assert pzs.param_dict(loaded)["mlp/Linear.weights"].data_array.sharding.spec == (
            PartitionSpec("data", "model")
        )
        doubled = jax.jit(lambda x: x * 2, donate_argnums=0)
        value = pzs.param_dict(loaded)["mlp/AddBias.bias"].data_array
        np.testing.assert_array_equal(doubled(value), 2 * weights["mlp/AddBias.bias"])


def test_dictionaries_and_modules_of_plain_arrays_take_tensors_as_they_are(tmp_path, mesh):
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    path = file_of(tmp_path, weight=square, bias=square[0])
    linear = equinox.nn.Linear(4, 4, key=jax.random.key(0))
    for model in (linear, {"weight": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}):
        loaded = pzs.param_dict(load_safetensors(path, mesh, into=model, on_unnamed="replicate"))
        np.testing.assert_array_equal(loaded["weight"], square)
        np.testing.assert_array_equal(loaded["bias"], square[0])


def test_each_part_is_read_once_and_nothing_beside_it(mesh, monkeypatch):
    monkeypatch.setattr(filling, "PIECE_BYTES", 64)
    monkeypatch.setattr(filling, "_OWN_PAGES_BYTES", 1)
    weights = TensorsInMemory({"w": np.arange(2 * 64 * 40, dtype=np.int32).reshape(2, 64, 40)})
    seen = []
    real = weights.read
    weights.read = lambda name, index: (seen.append(index), real(name, index))[1]
    view = {"w": WholeTensor(weights.tensors["w"])}
    for spec, share in (((None, "data", "model"), 1), ((None, None, "model"), 1), ((), 1)):
        seen.clear()
        sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(*spec))
        wanted = {"w": jax.ShapeDtypeStruct((2, 64, 40), "int32", sharding=sharding)}
        progress = ByteProgress()
        loaded = filling.filled_arrays(weights, view, wanted, progress)["w"]
        np.testing.assert_array_equal(loaded, weights.arrays["w"])
        counts = np.zeros((2, 64, 40), int)
        for index in seen:
            counts[index] += 1
            assert math.prod(s.stop - s.start for s in index) * 4 <= 64
        assert (counts == share).all()
        assert progress.done == progress.total == weights.arrays["w"].nbytes


def test_devices_of_another_mesh_cost_no_reading(mesh):
    weights = TensorsInMemory({"w": np.arange(64.0, dtype=np.float32)})
    half = pzs.make_mesh({"data": 2}, devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(half, PartitionSpec("data"))
    wanted = {"w": jax.ShapeDtypeStruct((64,), "float32", sharding=sharding)}
    views = {"w": WholeTensor(weights.tensors["w"])}
    loaded = filling.filled_arrays(weights, views, wanted, ByteProgress())["w"]
    assert loaded.sharding.device_set == {*jax.devices()[:2]}
    assert (weights.reads, weights.elements_read) == (2, 64)


def test_what_fails_while_parts_are_read_ends_the_loading(mesh):
    weights = TensorsInMemory({"w": UP, "v": UP})
    weights.read = lambda name, index: (_ for _ in ()).throw(OSError(5, "no such block"))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec())
    wanted = {n: jax.ShapeDtypeStruct(UP.shape, "float32", sharding=sharding) for n in "wv"}
    views = {name: WholeTensor(weights.tensors[name]) for name in "wv"}
    with pytest.raises(OSError, match="no such block"):
        filling.filled_arrays(weights, views, wanted, ByteProgress())


def test_floating_numbers_are_cast_as_asked_and_others_never(tmp_path, mesh):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 8)).astype(np.float32)
    path = file_of(tmp_path, w=weights, count=np.array([1, 2**31 - 1]))
    into = {"w": struct(SIZES), "count": struct({"n": 2}, "int32")}
    half = {"w": struct(SIZES, "bfloat16"), "count": into["count"]}
    options = {"on_dtype_mismatch": "cast"}
    for model, given in ((half, options), (into, options | {"dtype": "bfloat16"})):
        loaded = load_safetensors(path, mesh, RULES, into=model, **given)
        assert loaded["w"].data_array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            loaded["w"].data_array, jnp.asarray(weights).astype(jnp.bfloat16)
        )
        assert loaded["count"].data_array.tolist() == [1, 2**31 - 1]
    for model, given, text in (
        (half, {}, r"w: the file has float32, and the model wants bfloat16\. Pass on_dtype_mis"),
        (
            {"w": struct(SIZES, "int32"), "count": into["count"]},
            options,
            "floating numbers are not",
        ),
        (into, {"dtype": "bfloat16"}, "count: the file has int64, and the model wants int32"),
    ):
        with pytest.raises(CheckpointMismatchError, match=text):
            load_safetensors(path, mesh, RULES, into=model, **given)
    path = file_of(tmp_path, w=weights, count=np.array([1, 2**31]))
    with pytest.raises(CheckpointMismatchError, match="count: has int64 values beyond those of"):
        load_safetensors(path, mesh, RULES, into=into, **options)
    for wrong in ("int32", "flaot32", "float64"):
        with pytest.raises(TypeError, match=f"dtype='{wrong}': "):
            load_safetensors(path, mesh, RULES, into=into, dtype=wrong)


def test_names_are_matched_by_patterns(tmp_path, mesh):
    path = file_of(tmp_path, layers__0__w=UP, layers__1__w=UP + 1, layers__1__extra=UP, bias=UP[0])
    into = {f"block_{i}/w": struct(SIZES) for i in range(2)} | {"bias": struct({"neurons": 8})}
    names = {"layers.*.w": "block_*/w", "layers.1.extra": None}
    loaded = load_safetensors(path, mesh, RULES, into=into, names=names)
    np.testing.assert_array_equal(loaded["block_1/w"].data_array, UP + 1)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_safetensors(path, mesh, RULES, into=into)
    assert {p.partition(":")[0] for p in caught.value.problems} == {
        "block_0/w",
        "block_1/w",
        "layers.0.w",
        "layers.1.w",
        "layers.1.extra",
    }
    assert "names={stored: 'block_0/w'}" in caught.value.problems[0]


def test_what_is_missing_or_left_over_is_kept_or_left_when_asked(tmp_path, mesh):
    path = file_of(tmp_path, w=UP, extra=UP)
    own = np.arange(8, dtype=np.float32)
    into = {"w": struct(SIZES), "bias": pz.nx.wrap(own).tag("neurons")}
    options = {"on_missing": "keep", "on_extra": "ignore"}
    loaded = load_safetensors(path, mesh, RULES, into=into, **options)
    own[:] = 0
    assert loaded["bias"].data_array.tolist() == list(range(8))
    assert loaded["bias"].data_array.sharding.spec == PartitionSpec("model")
    for given, text in (
        ({"on_missing": "keep"}, r"extra: the file has \(4, 8\) float32, .*on_extra='ignore'"),
        ({"on_extra": "ignore"}, "bias: the model wants .*on_missing='keep'"),
    ):
        with pytest.raises(CheckpointMismatchError, match=text):
            load_safetensors(path, mesh, RULES, into=into, **given)
    missing = into | {"bias": pz.nx.NamedArray.wrap(jnp.ones(8)).tag("neurons")}
    missing = jax.eval_shape(lambda: missing)
    with pytest.raises(CheckpointMismatchError, match="bias: has a shape and no value"):
        load_safetensors(path, mesh, RULES, into=missing, **options)
    gone = jnp.ones(8)
    gone.delete()
    donated = into | {"bias": pz.nx.NamedArray.wrap(gone).tag("neurons")}
    with pytest.raises(CheckpointMismatchError, match="bias: has no value any more, since it"):
        load_safetensors(path, mesh, RULES, into=donated, **options)


def test_an_order_that_nothing_shows_has_to_be_said_and_is_put_right(tmp_path, mesh):
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    sizes = {"embedding": 4, "neurons": 4}
    cases = (
        (square, sizes, "'embedding' and 'neurons' are equally long"),
        (
            UP.T,
            SIZES,
            r"lengths in another order. .*axes={'w': \('neurons', 'embedding'\)}",
        ),
        (UP[:, :7], SIZES, "the sizes differ"),
        (UP.reshape(-1), SIZES, "the sizes differ"),
    )
    for stored, wanted, text in cases:
        path = file_of(tmp_path, w=stored)
        with pytest.raises(CheckpointMismatchError, match=text):
            load_safetensors(path, mesh, RULES, into={"w": struct(wanted)})
    for axes, stored, result in (
        (("neurons", "embedding"), square, square.T),
        (("embedding", "neurons"), square, square),
        (None, square, square),
        (("neurons", "embedding"), UP.T, UP),
    ):
        path = file_of(tmp_path, w=stored)
        into = {"w": struct(sizes if stored is square else SIZES)}
        loaded = load_safetensors(path, mesh, RULES, into=into, axes={"*": axes})["w"]
        assert tuple(loaded.named_axes) == ("embedding", "neurons")
        for shard in loaded.data_array.addressable_shards:
            np.testing.assert_array_equal(shard.data, result[shard.index])


WRONG_AXES = {
    "rank": (
        {"w": ("a",)},
        r"w: axes gives it 1 logical axes, \('a',\), and its shape",
    ),
    "nothing": ({"*": None, "v.*": ("a",)}, r"v\.\*: this pattern of axes matches no tensor"),
    "twice": ({"w": None, "*": None}, r"w: matched by 'w' and '\*' in axes"),
    "renamed": ({"w": ("embedding", "hidden")}, "rename_axes={'hidden': 'neurons'}"),
    "text": ({"w": "embedding"}, "these axes cannot be read"),
    "list": ([("a",)], "axes must be a mapping"),
}


@pytest.mark.parametrize("case", WRONG_AXES)
def test_axes_that_do_not_fit_are_refused(case, tmp_path, mesh):
    axes, text = WRONG_AXES[case]
    path = file_of(tmp_path, w=UP)
    with pytest.raises(pzs.ShardingError, match=text):
        load_safetensors(path, mesh, RULES, into={"w": struct(SIZES)}, axes=axes)


def test_logical_axes_may_have_other_names_in_the_model(tmp_path, mesh):
    path = file_of(tmp_path, w=UP.T)
    loaded = load_safetensors(
        path,
        mesh,
        RULES,
        into={"w": struct(SIZES)},
        axes={"w": ("hidden", "embedding")},
        rename_axes={"hidden": "neurons"},
    )
    np.testing.assert_array_equal(loaded["w"].data_array, UP)


def test_a_mesh_in_place_of_the_path_is_refused_by_what_it_is(mesh):
    with pytest.raises(TypeError, match=r"path is a Mesh: give the path .* comes first"):
        load_safetensors(mesh, "weights", {})


def test_options_that_mean_nothing_are_refused(tmp_path, mesh):
    path = file_of(tmp_path, w=UP)
    into = {"w": struct(SIZES)}
    for options, text in (
        ({"names": {"w": "v"}}, "names is an option of a model of your own"),
        ({"names": {}, "axes": {}}, "names, axes are options of a model of your own"),
        ({"into": into, "use_layer_stack": True}, "use_layer_stack is an option of the model that"),
        ({"into": into, "config": {}}, "config is an option"),
        ({"into": into, "on_missing": "skip"}, "choose one of 'error', 'keep'"),
        ({"into": into, "progress": "yes"}, "progress must be None, True, False"),
        ({"into": {}}, "this dict: it has no parameters"),
    ):
        with pytest.raises(TypeError, match=text):
            load_safetensors(path, mesh, RULES, **options)


def test_progress_counts_bytes_where_it_is_asked_for(tmp_path, mesh, capsys):
    path = file_of(tmp_path, w=UP)
    into = {"w": struct(SIZES)}
    load_safetensors(path, mesh, RULES, into=into)
    load_safetensors(path, mesh, RULES, into=into, progress=False)
    assert capsys.readouterr() == ("", "")
    load_safetensors(path, mesh, RULES, into=into, progress=True)
    assert re.fullmatch(r"loading: 0\.0 of 0\.0 MiB \(\d+ MiB/s\)\n", capsys.readouterr().err)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    load_safetensors(path, mesh, RULES, into=into, progress=terminal)
    assert "128/128 bytes" in terminal.file.getvalue()
    lines = Console(file=io.StringIO(), force_terminal=False)
    load_safetensors(path, mesh, RULES, into=into, progress=lines)
    assert lines.file.getvalue().startswith("loading: ")


def llama(directory):
    """A directory of Hugging Face with a small Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    shapes = {"model.embed_tokens": (32, 16), "lm_head": (32, 16), "model.norm": (16,)}
    for i in range(2):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.self_attn.{n}_proj": (16, 16) for n in "qo"}
        shapes |= {f"{block}.self_attn.{n}_proj": (8, 16) for n in "kv"}
        shapes |= {f"{block}.mlp.{n}_proj": (24, 16) for n in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj": (16, 24)}
        shapes |= {f"{block}.{n}_layernorm": (16,) for n in ("input", "post_attention")}
    rng = np.random.default_rng(1)
    weights = {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return weights


def test_a_directory_of_hugging_face_becomes_a_model_on_the_mesh(tmp_path, mesh):
    weights = llama(tmp_path)
    rules = {"embedding": "data", "neurons": "model", "vocabulary": "model"}
    model = load_safetensors(tmp_path, mesh, rules)
    found = pzs.param_dict(model)
    table = found["transformer/embedder.embeddings"]
    np.testing.assert_array_equal(
        np.asarray(table.unwrap("vocabulary", "embedding")), weights["model.embed_tokens.weight"]
    )
    assert "data" in jax.tree.leaves(tuple(table.data_array.sharding.spec))
    for leaf in jax.tree.leaves(pz.freeze_variables(model)):
        assert leaf.sharding.device_set == {*mesh.devices.flat}
    stacked = load_safetensors(tmp_path, mesh, {}, use_layer_stack=True, dtype="bfloat16")
    assert {v.data_array.dtype for v in pzs.param_dict(stacked).values()} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert len(pzs.param_dict(stacked)) < len(found)


def test_a_directory_of_hugging_face_that_does_not_fit_is_refused(tmp_path, mesh):
    weights = llama(tmp_path)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointMismatchError, match=r"its tensor 'model\.norm\.weight' is missing"
    ):
        load_safetensors(tmp_path, mesh, {})
    (tmp_path / "config.json").unlink()
    with pytest.raises(pzs.ShardingError, match=r"there is no configuration .*config\.json"):
        load_safetensors(tmp_path, mesh, {})
