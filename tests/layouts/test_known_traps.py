"""What goes wrong in sharded training without an error: each trap of the literature, as a test."""

import functools
import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard import (
    Layout,
    ShardingWarning,
    TrainState,
    abstract_model,
    build_train_step_fn,
    make_mesh,
    place,
    roll_layer_stacks,
    save_params,
    sharded_init,
    train_state_sharding,
)
from penzai_shard.library_apis import orbax_api
from penzai_shard.meshes import auto_twin
from tests.compiled_buffers import (
    compiled_programs,
    most_at_once,
    read_buffers,
    whole_copies,
)
from tests.layouts.preset_runs import PRESETS, SPLIT, TOKENS, build_model, mesh_of, run

EMBEDDING, NEURONS, VOCABULARY = 40, 56, 88


# No parameter is whole on one device.


@pytest.mark.parametrize("name", SPLIT)
def test_initialising_makes_nothing_whole_that_is_stored_split(name):
    found = run(name)

    def split(tree):
        return {
            leaf.shape
            for leaf in jax.tree.leaves(tree)
            if leaf.sharding.shard_shape(leaf.shape) != leaf.shape
        }

    *_, of_optimizer = found.initialising
    assert split(found.state.opt_state)
    assert whole_copies(of_optimizer, split(found.state.opt_state)) == []
    assert len(found.initialising) > 5
    for text in found.initialising:
        assert whole_copies(text, split(found.state.params)) == []


def test_the_check_sees_an_initialiser_that_makes_parameters_whole():
    mesh = mesh_of({"data": 8})
    shape = (EMBEDDING, NEURONS)

    def made_whole(key):
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=everywhere)(key)

    with compiled_programs() as texts:
        made_whole(jax.random.key(0))
    assert any(whole_copies(text, [shape]) for text in texts)


@pytest.mark.parametrize("name", ["tensor_parallel", "sequence_parallel", "two_dimensional"])
def test_a_step_makes_nothing_whole_that_tensor_parallelism_split(name):
    found = run(name)
    shapes = found.split_over("model")
    # Attention's four matrices and three of the perceptron; embedding table and head.
    assert len(shapes) == 7 + 2 * (name == "sequence_parallel")
    assert whole_copies(found.step, shapes) == []


def test_the_check_sees_what_fully_sharded_steps_gather():
    found = run("fully_sharded")
    gathered = whole_copies(found.step, found.split_over("data"))
    assert {"all-gather", "all-reduce"} <= {buffer.opcode for buffer in gathered}


def embedding_lookup(key):
    table = pz.nn.EmbeddingTable.from_config("embedder", key, VOCABULARY, {"embedding": EMBEDDING})
    return pz.nn.EmbeddingLookup(table)


def mean_of_output(model, rng, state, tokens):
    found = pz.nx.nmap(jnp.sin)(model(tokens))
    loss = found.untag("batch", "seq", "embedding").mean().unwrap()
    return loss, state, {"loss": loss}


def compiled_step(layout, mesh, build, loss_fn):
    """A step for a state that is never made."""
    model = abstract_model(build, jax.random.key(0))
    model = layout.recipe(model, mesh).apply(model)
    state = jax.eval_shape(
        lambda: TrainState.initial_state(model, optax.sgd(1e-2), jax.random.key(1))
    )
    shardings = train_state_sharding(state, mesh, layout.parameters, layout.optimizer)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings)
    return step.lower(state, tokens=layout.shard_batch(TOKENS, mesh)).compile()


def gathered_in_a_stack(layers, policy):
    """Whole copies of a stack's parameters in a fully sharded step, of one layer or of all."""

    def build(key):
        def block(init_base_rng):
            def linear(name, inputs, outputs):
                return pz.nn.Linear.from_config(name, init_base_rng, inputs, outputs)

            neurons, embedding = {"neurons": NEURONS}, {"embedding": EMBEDDING}
            mlp = [
                linear("up", embedding, neurons),
                pz.nn.Elementwise(jnp.tanh),
                linear("down", neurons, embedding),
            ]
            return TransformerBlock([pz.nn.Residual(pz.nn.Sequential(mlp))])

        stack = pz.nn.LayerStack.from_sublayer_builder(block, "layers", layers, key, {})
        return roll_layer_stacks(policy=policy).apply(
            pz.nn.Sequential([embedding_lookup(key), stack])
        )

    layout = Layout.fully_sharded(min_size=64)
    compiled = compiled_step(layout, mesh_of({"data": 8}), build, mean_of_output)
    matrix = (EMBEDDING, NEURONS)
    return whole_copies(compiled, [matrix, (layers, *matrix)])


def test_a_rolled_stack_gathers_one_layer_at_a_time():
    # Two matrices; each as it was gathered and as it is multiplied with, or its gradient.
    once = 4 * EMBEDDING * NEURONS
    assert most_at_once(gathered_in_a_stack(9, "nested")) == once


def test_the_check_sees_a_stack_that_keeps_what_it_gathered():
    kept = gathered_in_a_stack(5, False)
    assert {buffer.shape for buffer in kept} >= {(5, EMBEDDING, NEURONS), (5, NEURONS, EMBEDDING)}
    assert most_at_once(kept) > 2 * 5 * EMBEDDING * NEURONS


def test_saving_gives_orbax_the_parts_that_devices_hold(tmp_path, monkeypatch):
    mesh = mesh_of({"data": 8})
    model = place(
        {f"w{i}": pz.nx.ones({"a": 1024, "b": 1024}) for i in range(4)}, mesh, {"a": "data"}
    )
    save_params(tmp_path / "first", model)  # Orbax is loaded.
    given = {}
    begin_save = orbax_api.begin_save

    def spy(directory, arrays, metadata, *limits):
        given.update(arrays)
        return begin_save(directory, arrays, metadata, *limits)

    monkeypatch.setattr(orbax_api, "begin_save", spy)
    tracemalloc.start()
    save_params(tmp_path / "second", model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    own = {id(value.data_array) for value in model.values()}
    assert {id(array) for array in jax.tree.leaves(given)} == own
    assert peak < model["w0"].data_array.nbytes  # Of the host's memory, where a copy would be.


# Random numbers.


@pytest.mark.parametrize("name", PRESETS)
def test_initial_parameters_are_the_same_under_every_preset(name):
    assert_same_start(run(name).start)


@pytest.mark.parametrize("mesh", ["two devices", "explicit"])
def test_initial_parameters_are_the_same_on_other_meshes(mesh):
    if mesh == "explicit":
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
        rules = Layout.two_dimensional(min_size=64).parameters
    else:
        mesh, rules = mesh_of({"data": 2}), Layout.fully_sharded(min_size=64).parameters
    model = sharded_init(build_model, jax.random.key(0), mesh=mesh, rules=rules)
    assert_same_start({p.label: np.asarray(p.value.data_array) for p in pz.unbind_params(model)[1]})


def assert_same_start(found):
    expected = run("one device").start
    assert found.keys() == expected.keys()
    for label, value in expected.items():
        np.testing.assert_array_equal(found[label], value)


@functools.cache
def dropout_mask(spec, axis_types=AxisType.Auto):
    """What dropout leaves of ones that are laid out as a spec says."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_types,) * 2)
    ones = pz.nx.ones({"batch": 16, "seq": 4, "embedding": 8})
    ones = jax.device_put(ones, NamedSharding(auto_twin(mesh), PartitionSpec(*spec)))

    def dropped(ones, key):
        stream = pz.RandomStream.from_base_key(key, offset_label="offset")
        return pz.nn.StochasticDropout(0.5)(ones, random_stream=stream)

    return np.asarray(jax.jit(dropped)(ones, jax.random.key(0)).data_array)


@pytest.mark.parametrize(
    "spec", [("data",), (("data", "model"),), ("data", "model"), (None, None, "model")]
)
def test_dropout_masks_are_the_same_under_every_layout_and_differ_across_its_parts(spec):
    mask = dropout_mask(spec)
    np.testing.assert_array_equal(mask, dropout_mask(()))
    parts = [
        part
        for split in np.split(mask, 8)  # The examples of each device.
        for part in np.split(split, 2, axis=2)
    ]
    assert {0.0, 2.0} == set(np.unique(mask))
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(parts, 2))


# The gradient of the embedding table.


@pytest.mark.parametrize("split", ["vocabulary", "embedding"])
def test_the_gradient_of_a_split_embedding_table_stays_split(split):
    rules = {split: "model"}
    layout = Layout(
        parameters=rules, compute={"batch": "data"} | rules, blocks=pz.nn.EmbeddingLookup
    )

    def build(key):
        return pz.nn.Sequential([embedding_lookup(key)])

    step = compiled_step(layout, mesh_of({"data": 4, "model": 2}), build, mean_of_output)
    assert whole_copies(step, [(VOCABULARY, EMBEDDING)]) == []
    halves = [b for b in read_buffers(step) if b.size == VOCABULARY * EMBEDDING // 2]
    assert "all-reduce" in {buffer.opcode for buffer in halves}  # Over the data axis.


# Compilations.


@pytest.mark.parametrize("name", PRESETS)
def test_no_step_after_the_first_compiles(name):
    first, *later = run(name).compilations
    assert first > 0
    assert later == [0, 0]


def test_rules_of_parameters_alone_mean_that_the_batch_is_whole_and_misspelt_ones_still_warn():
    model, mesh = build_model(jax.random.key(0)), make_mesh({"model": 8}, abstract=True)

    def traced(rules):
        edited = Layout(parameters={"vocabulary": "model"}, compute=rules).recipe(model, mesh)
        jax.eval_shape(lambda: edited.apply(model)(TOKENS))

    traced({"vocabulary": "model"})
    with pytest.warns(ShardingWarning, match="Did you mean 'batch'"):
        traced({"vocabulary": "model", "batc": "model"})
