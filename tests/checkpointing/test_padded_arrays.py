"""Checkpoints hold true lengths: what is stored padded is saved without, and restored with or
without padding on any mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from penzai import pz
from penzai.models import simple_mlp

import penzai_shard as pzs
from penzai_shard.checkpointing import padded_layouts
from penzai_shard.errors import CheckpointMismatchError
from penzai_shard.even_layouts import true_layout
from penzai_shard.library_apis import orbax_api

RULES = {"features": "data", "features_out": "model"}


def build(seed=0):
    return simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(seed), feature_sizes=[7, 5, 3]
    )


def values_of(model):
    return {v.label: v.value for v in pz.unbind_params(model, freeze=True)[1]}


def padded_names(model):
    return {name for name, value in values_of(model).items() if isinstance(value, pzs.PaddedArray)}


def assert_same(model, other):
    own, others = values_of(model), values_of(other)
    assert list(own) == list(others)
    for name, value in own.items():
        np.testing.assert_array_equal(value.data_array, others[name].data_array)


@pytest.fixture(scope="module")
def meshes():
    return {
        "pads": pzs.make_mesh({"data": 4, "model": 2}),
        "pads other": pzs.make_mesh({"data": 2, "model": 4}),
        "divides": pzs.make_mesh({"other": 8}),
    }


@pytest.fixture(scope="module")
def padded(meshes):
    return pzs.place(build(), meshes["pads"], RULES, on_indivisible="pad")


@pytest.fixture(scope="module")
def saved(padded, tmp_path_factory):
    directory = tmp_path_factory.mktemp("padded")
    pzs.save_params(directory / "padded", padded)
    pzs.save_params(directory / "plain", build())
    pzs.save_safetensors(directory / "weights", padded)
    return directory


def test_parameters_are_shown_and_taken_without_padding(padded):
    shown = pzs.param_dict(padded)
    assert all(type(value) is pz.nx.NamedArray for value in shown.values())
    for name, value in pzs.param_dict(build()).items():
        np.testing.assert_array_equal(shown[name].data_array, value.data_array)
    other = pzs.with_params(padded, pzs.param_dict(build(seed=1)))
    assert_same(other, build(seed=1))
    for name, value in values_of(other).items():
        before = values_of(padded)[name]
        assert jax.tree.structure(value) == jax.tree.structure(before)
        if isinstance(value, pzs.PaddedArray):
            assert value.stored.sharding == before.stored.sharding
    assert padded_names(pzs.with_params(build(seed=1), pzs.param_dict(padded))) == set()
    same = pzs.with_params(padded, {v.label: v.value for v in pz.unbind_params(padded)[1]})
    assert padded_names(same) == padded_names(padded)


def test_other_lengths_are_refused_by_the_true_ones(padded):
    wrong = dict(pzs.param_dict(padded))
    wrong["mlp/Affine_0/Linear.weights"] = pz.nx.ones({"features": 8, "features_out": 6})
    with pytest.raises(CheckpointMismatchError, match=r"features=8, features_out=6.*features=7, f"):
        pzs.with_params(padded, wrong)


def test_a_checkpoint_has_the_true_lengths(saved):
    comparison = pzs.compare_checkpoints(saved / "padded", saved / "plain")
    assert comparison.are_equal
    assert "features=7" in str(pzs.describe_checkpoint(saved / "padded"))
    assert pzs.compare_checkpoints(saved / "padded", build()).fits
    assert str(pzs.verify_checkpoint(saved / "padded")).startswith("as it was saved")


@pytest.mark.parametrize(
    ("source", "target", "into"),
    [
        ("plain", "pads", "abstract"),
        ("padded", "pads", "padded"),
        ("padded", "pads other", "padded"),
        ("plain", "pads other", "padded"),
        ("padded", "divides", "abstract"),
        ("padded", "divides", "concrete"),
    ],
)
def test_it_restores_on_any_mesh(saved, meshes, padded, source, target, into):
    model = {"abstract": pzs.abstract_model(build), "concrete": build(1), "padded": padded}[into]
    rules = {"features": "other"} if target == "divides" else RULES
    plan = pzs.make_plan(model, meshes[target], rules, on_indivisible="pad")
    restored = pzs.restore_params(saved / source, model, plan=plan)
    assert_same(restored, build())
    assert padded_names(restored) == {leaf.path for leaf in plan.leaves if leaf.padding}
    assert padded_names(restored)
    for leaf in plan.leaves:
        value = values_of(restored)[leaf.path]
        (stored,) = jax.tree.leaves(value)
        assert stored.shape == leaf.stored_shape
        assert stored.sharding.is_equivalent_to(leaf.sharding, stored.ndim)


def test_it_restores_without_padding_too(saved, meshes, padded):
    restored = pzs.restore_params(saved / "padded", padded, meshes["pads"], {})
    assert padded_names(restored) == set()
    assert_same(restored, build())


def test_no_array_is_whole_on_a_device_while_it_is_read(meshes):
    structs = pzs.restore_structs(
        {"w": pz.nx.ones({"vocabulary": 257, "embedding": 16})},
        meshes["pads"],
        {"vocabulary": ("data", "model")},
        on_indivisible="pad",
    )
    assert structs["w"].stored.shape == (264, 16)
    read = true_layout(structs["w"].stored.sharding, (257, 16))
    assert read.spec == PartitionSpec(None, ("data", "model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_no_length_divides_no_device_has_the_whole_array_either(
    meshes, tmp_path, monkeypatch, dtype
):
    wanted = {
        "neither": pz.nx.wrap(np.arange(33 * 35).reshape(33, 35).astype(dtype), "a", "b"),
        "one": pz.nx.wrap(np.arange(33 * 32).reshape(33, 32).astype(dtype), "a", "b"),
    }
    rules = {"a": "data", "b": "model"}
    padded = pzs.place(wanted, meshes["pads"], rules, on_indivisible="pad")
    parts = {name: value.stored.addressable_shards[0].data.size for name, value in padded.items()}
    on_devices = {}

    def watched(called):
        of_orbax = getattr(orbax_api, called)

        def call(where, arrays, *rest):
            for path, array in jax.tree_util.tree_leaves_with_path(arrays):
                if getattr(array, "sharding", None) is not None:
                    part = array.sharding.shard_shape(array.shape)
                    on_devices[called, jax.tree_util.keystr(path[-1:])] = np.prod(part)
            return of_orbax(where, arrays, *rest)

        monkeypatch.setattr(orbax_api, called, call)

    for called in ("begin_save", "load"):
        watched(called)
    path = pzs.save_params(tmp_path / "checkpoint", padded)
    restored = pzs.restore_params(path, wanted, meshes["pads"], rules, on_indivisible="pad")
    for name, value in restored.items():
        assert jax.tree.structure(value) == jax.tree.structure(padded[name])
        assert value.stored.sharding == padded[name].stored.sharding
        np.testing.assert_array_equal(value.stored, padded[name].stored)
    # The other one went through host memory.
    assert set(on_devices) == {("begin_save", "['one']"), ("load", "['one']")}
    assert max(on_devices.values()) <= parts["one"]


def test_orbax_itself_reads_into_padded_structs(saved, meshes, padded):
    structs = pzs.restore_structs(padded, meshes["pads"], RULES, on_indivisible="pad")
    context = orbax_api.orbax().Context()
    context.array.loading.enable_padding_and_truncation = True
    with context:
        wanted = {name: jax.tree.leaves(struct)[0] for name, struct in structs.items()}
        read = orbax_api.orbax().load(saved / "padded", wanted)
    for name, value in values_of(padded).items():
        np.testing.assert_array_equal(read[name], jax.tree.leaves(value)[0])
        assert read[name].sharding == wanted[name].sharding


def test_where_no_length_divides_axes_and_dtypes_are_changed_too(meshes, tmp_path):
    saved = {"w": pz.nx.wrap(np.arange(35.0, dtype=np.float32).reshape(7, 5), "a", "b")}
    wanted = {"w": pz.nx.wrap(np.zeros((5, 7), jax.numpy.bfloat16), "b", "a")}
    path = pzs.save_params(tmp_path / "checkpoint", saved)
    restored = pzs.restore_params(
        path,
        wanted,
        meshes["pads"],
        {"a": "data", "b": "model"},
        on_indivisible="pad",
        on_axis_mismatch="transpose",
        on_dtype_mismatch="cast",
    )
    assert restored["w"].stored.shape == (6, 8)
    assert restored["w"].dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(restored["w"].data_array, saved["w"].data_array.T)


def test_states_that_were_moved_to_one_device_are_saved_and_restored(meshes, padded, tmp_path):
    moved = jax.device_put(values_of(padded), jax.devices()[3])
    pzs.save_train_state(tmp_path / "state", moved)
    restored = pzs.restore_train_state(tmp_path / "state", moved)
    for name, value in restored.items():
        assert jax.tree.structure(value) == jax.tree.structure(moved[name])
        np.testing.assert_array_equal(value.data_array, moved[name].data_array)


def test_kept_and_initialised_parameters_are_padded_too(saved, meshes, padded):
    only = "mlp/Affine_1/**"
    for others in ("keep", lambda: build(0)):
        restored = pzs.restore_params(
            saved / "padded",
            padded,
            meshes["pads other"],
            RULES,
            only=only,
            others=others,
            on_indivisible="pad",
        )
        for name, value in values_of(restored).items():
            np.testing.assert_allclose(
                value.data_array, values_of(build())[name].data_array, rtol=1e-6
            )
        assert padded_names(restored) == padded_names(padded)


def test_weights_of_safetensors_have_the_true_lengths_and_are_read_part_by_part(
    saved, meshes, padded, monkeypatch
):
    monkeypatch.delattr(padded_layouts, "padded_on_devices")  # Nothing is padded once it is there.
    restored = pzs.load_safetensors(
        saved / "weights",
        meshes["pads"],
        RULES,
        into=pzs.abstract_model(build),
        on_indivisible="pad",
    )
    for name, value in values_of(restored).items():
        expected = values_of(padded)[name]
        assert jax.tree.structure(value) == jax.tree.structure(expected)
        for own, other in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
            assert own.sharding == other.sharding
            np.testing.assert_array_equal(own, other)


def test_weights_that_safetensors_do_not_have_are_kept_padded(meshes, padded, tmp_path):
    values = pzs.param_dict(build(seed=1))
    pzs.save_safetensors(tmp_path / "weights", {n: v for n, v in values.items() if "Affine_0" in n})
    restored = pzs.load_safetensors(
        tmp_path / "weights",
        meshes["pads other"],
        RULES,
        into=padded,
        on_missing="keep",
        on_indivisible="pad",
    )
    for name, value in pzs.param_dict(restored).items():
        expected = values[name] if "Affine_0" in name else pzs.param_dict(padded)[name]
        np.testing.assert_array_equal(value.data_array, expected.data_array)
    assert padded_names(restored) == padded_names(padded)


def test_a_run_goes_on_on_another_mesh(meshes, padded, tmp_path):
    state = {"params": dict(values_of(padded)), "step": jax.device_put(np.int32(3))}
    with pzs.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state)
        manager.wait()
        same = manager.restore(state)
    for name, value in state["params"].items():
        assert jax.tree.structure(same["params"][name]) == jax.tree.structure(value)
        np.testing.assert_array_equal(same["params"][name].data_array, value.data_array)
    pzs.save_train_state(tmp_path / "state", state)
    other = pzs.restore_train_state(
        tmp_path / "state", state, meshes["pads other"], RULES, on_indivisible="pad"
    )
    moved = pzs.restore_train_state(tmp_path / "state", state, meshes["divides"], {})
    for restored in (other, moved):
        for name, value in state["params"].items():
            np.testing.assert_array_equal(restored["params"][name].data_array, value.data_array)
    assert any(isinstance(v, pzs.PaddedArray) for v in other["params"].values())
    assert not any(isinstance(v, pzs.PaddedArray) for v in moved["params"].values())


def test_stacked_blocks_restore_padded(meshes, tmp_path):
    blocks = {
        f"block_{i}/w": pz.nx.wrap(np.arange(21.0).reshape(7, 3) + i, "a", "b") for i in (0, 1)
    }
    placed = pzs.place(blocks, meshes["pads"], {"a": "data"}, on_indivisible="pad")
    pzs.save_params(tmp_path / "blocks", placed)
    stacked = pzs.stack_blocks(placed)
    ((name, value),) = stacked.items()
    expected = np.stack([blocks[f"block_{i}/w"].data_array for i in (0, 1)])
    np.testing.assert_array_equal(np.asarray(value.data_array).reshape(expected.shape), expected)
    restored = pzs.restore_params(
        tmp_path / "blocks",
        {name: value},
        meshes["pads"],
        {"a": "data", "b": "model"},
        on_block_mismatch="convert",
        on_indivisible="pad",
    )
    assert isinstance(restored[name], pzs.PaddedArray)
    np.testing.assert_array_equal(restored[name].data_array, value.data_array)
