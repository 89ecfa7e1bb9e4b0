import asyncio
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from penzai.deprecated.v1 import pz as pz1

from penzai_shard.checkpointing import (
    param_dict,
    restore_params,
    restore_structs,
    save_params,
    save_train_state,
)
from penzai_shard.meshes import auto_twin, has_explicit_axes
from penzai_shard.placement import abstract_model, sharded_init
from penzai_shard.planning import make_plan

P = PartitionSpec
FSDP = {"embedding": "data", "neurons": "model"}
MODEL_ONLY = {"neurons": "model"}


def place(values, mesh, rules):
    """Named arrays laid out as planned."""
    return jax.device_put(values, make_plan(values, mesh, rules).sharding_tree())


def assert_restored(restored, original, mesh, rules):
    """Bit-equal values, and exactly the planned shardings and shards."""
    plan = make_plan(original, mesh, rules)
    planned = {leaf.path: leaf for leaf in plan.leaves}
    assert restored.keys() == original.keys() == planned.keys()
    for name, value in restored.items():
        array, leaf = value.data_array, planned[name]
        assert array.sharding == leaf.sharding, name
        assert array.sharding.spec == leaf.spec
        assert {s.data.shape for s in array.addressable_shards} == {leaf.shard_shape}
        assert tuple(value.named_shape) == tuple(original[name].named_shape)
        np.testing.assert_array_equal(np.asarray(array), np.asarray(original[name].data_array))


def test_restores_onto_another_mesh_under_other_rules(tmp_path, mlp, build, wide, tall):
    original = place(param_dict(mlp), wide, FSDP)
    path = save_params(tmp_path / "params", original)
    assert path == str(tmp_path / "params")
    for rules in (FSDP, MODEL_ONLY, {}, {"neurons": ("data", "model")}):
        restored = restore_params(path, build(seed=5), tall, rules)
        assert_restored(param_dict(restored), original, tall, rules)


def test_inserted_layers_do_not_matter(tmp_path, mlp, build, wide):
    edited = pz.select(mlp).at_instances_of(pz.nn.Linear).insert_after(pz.nn.Identity())
    path = save_params(tmp_path / "params", pz.nn.Sequential([edited]))
    restored = restore_params(path, pz.nn.Sequential([pz.nn.Identity(), build(3)]), wide, FSDP)
    assert_restored(param_dict(restored), param_dict(mlp), wide, FSDP)


def test_a_restored_model_runs_and_leaves_the_given_one_alone(tmp_path, mlp, build, wide):
    x = pz.nx.ones({"batch": 2, "embedding": 8})
    expected = mlp(x)
    path = save_params(tmp_path / "params", mlp)
    given = build(seed=7)
    before = param_dict(given)
    restored = restore_params(path, given, wide, FSDP)
    result = restored(jax.device_put(x, NamedSharding(wide, P())))
    np.testing.assert_allclose(
        result.unwrap("batch", "embedding"), expected.unwrap("batch", "embedding"), rtol=1e-5
    )
    assert all(param_dict(given)[name] is value for name, value in before.items())
    (calls,) = pz.unbind_state_vars(restored)[1]
    assert int(calls.value) == 1
    assert calls.value.sharding == NamedSharding(wide, P())
    assert int(pz.unbind_state_vars(given)[1][0].value) == 0


def test_an_abstract_model_is_filled_and_runs(tmp_path, mlp, build, wide):
    path = save_params(tmp_path / "params", mlp)
    skeleton, variables = pz.unbind_params(build(1), freeze=True)
    abstract = pz.bind_variables(skeleton, jax.eval_shape(lambda: variables))
    restored = restore_params(path, abstract, wide, FSDP)
    assert_restored(param_dict(restored), param_dict(mlp), wide, FSDP)
    found = pz.unbind_params(restored)[1]
    assert len(found) == 4
    assert all(isinstance(variable, pz.Parameter) for variable in found)
    ups = [layer for layer in restored.sublayers if isinstance(layer, pz.nn.Affine)][::2]
    assert ups[0].sublayers[0].weights is ups[1].sublayers[0].weights
    restored(jax.device_put(pz.nx.ones({"embedding": 8}), NamedSharding(wide, P())))


def test_a_state_variable_without_value_is_refused(tmp_path, mlp, build, wide):
    path = save_params(tmp_path / "params", mlp)
    abstract = jax.eval_shape(lambda: pz.freeze_variables(build()))
    with pytest.raises(ValueError, match="sublayers/2/calls: this state variable has a shape and"):
        restore_params(path, abstract, wide, FSDP)


def test_dictionaries_come_back_as_they_are_nested(tmp_path, wide):
    values = {
        "layer": {"w": pz.nx.arange("a", 8) + pz.nx.zeros({"b": 4})},
        "pair": (pz.nx.ones({"a": 8}), jnp.float32(3)),
    }
    path = save_params(tmp_path / "params", values)
    structs = jax.eval_shape(lambda: values)
    restored = restore_params(path, structs, wide, {"a": "data"})
    assert jax.tree.structure(restored) == jax.tree.structure(values)
    jax.tree.map(np.testing.assert_array_equal, restored, values)
    assert restored["layer"]["w"].data_array.sharding == NamedSharding(wide, P("data"))
    assert restored["pair"][1].sharding == NamedSharding(wide, P())


def test_models_of_the_first_api(tmp_path, wide):
    definition = pz1.nn.add_parameter_prefix(
        "net", pz1.nn.Affine.from_config({"embedding": 8}, {"neurons": 16})
    )
    model = pz1.nn.initialize_parameters(definition, jax.random.key(0))
    path = save_params(tmp_path / "params", model)
    for like in (definition, model):
        restored = restore_params(path, like, wide, FSDP)
        assert_restored(param_dict(restored), param_dict(model), wide, FSDP)
        restored(jax.device_put(pz.nx.ones({"embedding": 8}), NamedSharding(wide, P())))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "int8", "bool", "uint32", "complex64", "int4", "float8_e4m3fn"]
)
def test_dtypes_survive(tmp_path, wide, dtype):
    value = pz.nx.wrap(jnp.arange(8).astype(dtype)).tag("a")
    path = save_params(tmp_path / "params", {"w": value})
    restored = restore_params(path, {"w": value}, wide, {"a": "data"})["w"]
    assert restored.dtype == jnp.dtype(dtype)
    assert restored.data_array.sharding.spec == P("data")
    np.testing.assert_array_equal(restored.unwrap("a"), value.unwrap("a"))


def test_scalars_numpy_arrays_and_empty_arrays_survive(tmp_path, wide):
    values = {
        "float": 2.5,
        "int": 3,
        "bool": True,
        "numpy_scalar": np.float32(1.5),
        "numpy": np.arange(4, dtype=np.int32),
        "rank0": jnp.float32(1),
        "empty": pz.nx.zeros({"a": 0, "b": 8}),
        "odd name [0] 50%": jnp.ones(2),
    }
    path = save_params(tmp_path / "params", values)
    restored = restore_params(path, values, wide, {"b": "data"}, on_unnamed="replicate")
    assert jax.tree.map(lambda x: x.tolist(), restored["odd name [0] 50%"]) == [1.0, 1.0]
    assert restored["float"].tolist() == 2.5
    assert restored["int"].tolist() == 3
    assert restored["bool"].tolist() is True
    assert restored["numpy_scalar"].tolist() == 1.5
    assert restored["numpy"].tolist() == [0, 1, 2, 3]
    assert restored["empty"].named_shape == {"a": 0, "b": 8}
    assert restored["empty"].data_array.sharding == NamedSharding(wide, P(None, "data"))


def test_random_keys_survive_with_their_implementation(tmp_path, wide):
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 8)
    values = {"one": jax.random.key(3), "many": pz.nx.wrap(keys).tag("a")}
    path = save_params(tmp_path / "params", values)
    restored = restore_params(path, jax.eval_shape(lambda: values), wide, {"a": "data"})
    assert restored["one"].dtype == values["one"].dtype
    assert restored["one"].sharding == NamedSharding(wide, P())
    assert restored["many"].data_array.sharding == NamedSharding(wide, P("data"))
    assert str(jax.random.key_impl(restored["many"].data_array)) == "rbg"
    for name in values:
        a, b = (jax.tree.leaves(d[name])[0] for d in (values, restored))
        np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))


def test_views_are_saved_as_they_lie_and_fill_views(tmp_path, wide):
    array = pz.nx.wrap(jnp.arange(24.0).reshape(2, 3, 4)).tag("a", "b", "c")
    view = array.untag("b")
    path = save_params(tmp_path / "params", {"w": view})
    restored = restore_params(path, {"w": view}, wide, {"c": "data"})["w"]
    assert isinstance(restored, pz.nx.NamedArrayView)
    assert restored.data_array.sharding == NamedSharding(wide, P(None, None, "data"))
    np.testing.assert_array_equal(
        restored.tag("b").unwrap("a", "b", "c"), array.unwrap("a", "b", "c")
    )
    # The same thing in the usual order, with its positional dimension first.
    usual = {"w": view.with_positional_prefix()}
    moved = restore_params(path, usual, wide, {"c": "data"}, on_axis_mismatch="transpose")["w"]
    np.testing.assert_array_equal(moved.data_array, usual["w"].data_array)
    assert moved.data_array.sharding == NamedSharding(wide, P(None, None, "data"))


def test_restore_structs_are_planned_and_named(mlp, tall):
    structs = restore_structs(mlp, tall, FSDP)
    leaf = structs["mlp/up/Linear.weights"]
    assert dict(leaf.named_shape) == {"embedding": 8, "neurons": 16}
    assert leaf.data_array == jax.ShapeDtypeStruct(
        (8, 16), "float32", sharding=NamedSharding(tall, P("data", "model"))
    )
    assert structs.keys() == param_dict(mlp).keys()
    abstract = jax.eval_shape(lambda: pz.freeze_variables(mlp))
    assert jax.tree.leaves(restore_structs(abstract, tall, FSDP)) == jax.tree.leaves(structs)


def test_explicit_meshes_give_arrays_on_their_auto_twin(tmp_path, mlp, build):
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    assert has_explicit_axes(explicit)
    values = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(explicit, P())), param_dict(mlp)
    )
    with jax.set_mesh(explicit):
        path = save_params(tmp_path / "params", values)
        restored = restore_params(path, build(4), explicit, FSDP)
        keys = save_params(tmp_path / "keys", {"key": jax.random.key(0)})
        key = restore_params(keys, {"key": jax.random.key(1)}, explicit)
        save_params(keys, key, overwrite=True)
    assert key["key"] == jax.random.key(0)
    assert_restored(param_dict(restored), param_dict(mlp), auto_twin(explicit), FSDP)


@pytest.mark.parametrize("explicit", [False, True])
def test_swapped_axes_are_put_right_within_each_device(tmp_path, mlp, tall, explicit):
    original = param_dict(mlp)
    path = save_params(tmp_path / "params", original)
    swapped = {name: v.order_as(*reversed(v.named_shape)) for name, v in original.items()}
    mesh = jax.make_mesh((2, 4), ("data", "model")) if explicit else tall
    with jax.set_mesh(mesh):
        restored = restore_params(path, swapped, mesh, FSDP, on_axis_mismatch="transpose")
    assert_restored(restored, swapped, tall, FSDP)


def test_casting_is_asked_for_by_name(tmp_path, mlp, wide):
    path = save_params(tmp_path / "params", mlp)
    half = {name: v.astype(jnp.bfloat16) for name, v in param_dict(mlp).items()}
    restored = restore_params(path, half, wide, FSDP, on_dtype_mismatch="cast")
    assert_restored(restored, half, wide, FSDP)


def test_numbers_saved_with_x64_keep_the_order_of_their_axes_without_it(tmp_path, wide):
    numbers = np.arange(64.0).reshape(8, 8)
    with jax.enable_x64(True):
        path = save_params(tmp_path / "x64", {"w": pz.nx.wrap(jnp.asarray(numbers), "a", "b")})
    like = {"w": pz.nx.zeros({"a": 8, "b": 8})}
    restored = restore_params(path, like, wide, {"a": "data"}, on_dtype_mismatch="cast")
    np.testing.assert_array_equal(restored["w"].data_array, numbers)


def test_axes_are_renamed_on_the_way(tmp_path, wide):
    path = save_params(tmp_path / "params", {"w": pz.nx.ones({"old": 8, "b": 2})})
    like = {"w": pz.nx.ones({"b": 2, "new": 8})}
    restored = restore_params(
        path,
        like,
        wide,
        {"new": "data"},
        rename_axes={"old": "new"},
        on_axis_mismatch="transpose",
    )
    assert_restored(restored, like, wide, {"new": "data"})


def test_a_part_of_a_checkpoint_is_restored_without_the_rest(tmp_path, mlp, wide):
    path = save_params(tmp_path / "params", mlp)
    part = {name: v for name, v in param_dict(mlp).items() if name.startswith("mlp/up")}
    assert_restored(restore_params(path, part, wide, FSDP, on_extra="ignore"), part, wide, FSDP)


def test_no_device_holds_or_reads_more_than_its_part(tmp_path, wide, monkeypatch):
    from orbax.checkpoint._src.serialization import serialization

    values = {"w": pz.nx.wrap(jnp.arange(512.0).reshape(16, 32)).tag("a", "b")}
    rules = {"a": "data", "b": "model"}
    path = save_params(tmp_path / "params", place(values, wide, rules))
    read = []
    original = serialization._read_shard

    async def watched(**arguments):
        read.append(tuple(arguments["restricted_domain"].shape))
        return await original(**arguments)

    monkeypatch.setattr(serialization, "_read_shard", watched)
    restored = restore_params(path, values, wide, rules)
    assert read == [(4, 16)] * 8
    assert_restored(restored, values, wide, rules)


def test_parameters_are_taken_from_a_train_state(tmp_path, mlp, wide):
    values = param_dict(mlp)
    path = save_train_state(tmp_path / "state", {"step": 3, "params": values, "opt_state": values})
    assert_restored(restore_params(path, values, wide, FSDP), values, wide, FSDP)


def test_works_inside_a_running_event_loop_as_in_a_notebook(tmp_path, wide):
    values = {"w": pz.nx.ones({"a": 8})}

    async def cell():
        path = save_params(tmp_path / "params", values)
        return restore_params(path, values, wide, {"a": "data"})

    assert_restored(asyncio.run(cell()), values, wide, {"a": "data"})


def test_another_ambient_mesh_does_not_matter(tmp_path, wide, tall):
    values = {"w": pz.nx.ones({"a": 8, "b": 4}), "key": jax.random.key(0)}
    like = {"w": values["w"].order_as("b", "a"), "key": jax.random.key(1)}
    with jax.set_mesh(wide):
        path = save_params(tmp_path / "params", values)
        restored = restore_params(path, like, tall, {"a": "model"}, on_axis_mismatch="transpose")
        save_params(path, restored, overwrite=True)
    assert restored["w"].data_array.sharding == NamedSharding(tall, P(None, "model"))
    assert restored["key"] == values["key"]


def test_nothing_is_left_running_or_written_to_the_terminal(tmp_path, wide, capfd):
    values = {"w": pz.nx.ones({"a": 8, "b": 4})}
    threads = set(threading.enumerate())
    path = save_params(tmp_path / "params", values)
    restore_params(path, values, wide, {"a": "data"})
    # Idle workers of Orbax' event loops end once the loops are collected.
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= threads
    assert capfd.readouterr() == ("", "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["params"]


def test_relative_paths_start_at_the_working_directory(tmp_path, wide, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"w": pz.nx.ones({"a": 8})}
    assert save_params("run/params", values) == str(tmp_path / "run" / "params")
    assert_restored(restore_params("run/params", values, wide, {}), values, wide, {})


def test_models_that_were_initialised_sharded_fill_abstract_ones(tmp_path, build, wide, tall):
    model = sharded_init(build, mesh=wide, axis_name_to_mesh_name=FSDP)
    path = save_params(tmp_path / "params", model)
    restored = restore_params(path, abstract_model(build, 1), tall, MODEL_ONLY)
    assert_restored(param_dict(restored), param_dict(model), tall, MODEL_ONLY)
    x = pz.nx.ones({"batch": 2, "embedding": 8})
    results = [
        m(jax.device_put(x, NamedSharding(mesh, P()))).unwrap("batch", "embedding")
        for m, mesh in ((model, wide), (restored, tall))
    ]
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_saving_replicated_arrays_compiles_nothing(tmp_path, wide, caplog):
    values = {f"w{i}": pz.nx.zeros({"a": 8, "b": i + 1}) for i in range(3)}
    placed = jax.device_put(values, NamedSharding(wide, P()))
    with jax.log_compiles():
        save_params(tmp_path / "params", placed)
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1.0)
    assert any("Compiling" in record.message for record in caplog.records)
