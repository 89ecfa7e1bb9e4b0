"""A train state that was saved under one layout goes on under another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard.checkpointing import (
    read_manifest,
    restore_train_state,
    save_train_state,
)
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError
from penzai_shard.layers import AxesInPlace, RolledLayerStack
from penzai_shard.layouts import Layout
from penzai_shard.meshes import make_mesh
from penzai_shard.surgery import (
    Recipe,
    insert_after,
    jit_root,
    rematerialise_blocks,
    roll_layer_stacks,
    strip,
    wrap,
)
from penzai_shard.surgery.inserted_layers import Original
from penzai_shard.training import TrainState
from tests.model_families import transformer


@pz.pytree_dataclass
class Around(pz.nn.Layer):
    """A layer of somebody else's around a layer of the model."""

    body: object

    def __call__(self, *args, **side_inputs):
        return self.body(*args, **side_inputs)


class _WithoutOriginals:
    """Takes what was put around out by hand, as a recipe would be applied."""

    def apply(self, model):
        return pz.select(model).at_instances_of(Original).apply(lambda original: original.body)


LAYOUTS = {
    "data_parallel": Layout.data_parallel(),
    "zero1": Layout.zero1(min_size=0),
    "fully_sharded": Layout.fully_sharded(min_size=0, reshard_after_forward=True),
    "tensor_parallel": Layout.tensor_parallel(),
    "sequence_parallel": Layout.sequence_parallel(vocabulary="model"),
    "two_dimensional": Layout.two_dimensional(min_size=0, vocabulary="model"),
}


def arrays_of(state):
    """Every array of a state whose model has nothing put into it, random keys as numbers."""
    bare = (strip(pz.freeze_variables(state.model)), state.opt_state, state.step)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(bare)] + [
        np.asarray(jax.random.key_data(state.root_rng))
    ]


def started(edits, seed, **options):
    """The state of a model after some edits; another seed has other values everywhere."""
    model = transformer("llama", jax.random.key(seed), **options)
    # Constants differ too, as if they had been set by hand.
    model = (
        pz.select(model)
        .at_instances_of(pz.nn.RMSStandardize)
        .apply(
            lambda layer: dataclasses.replace(layer, epsilon=np.float32(layer.epsilon * (1 + seed)))
        )
    )
    for edit in edits:
        recipe = edit(model) if callable(edit) else edit
        model = recipe.apply(model)
    return TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(seed))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def states(mesh):
    """One state per layout."""
    return {
        name: started([functools.partial(layout.recipe, mesh=mesh)], 0)
        for name, layout in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, states):
    folder = tmp_path_factory.mktemp("states")
    for name in ("fully_sharded", "sequence_parallel"):
        save_train_state(folder / name, states[name])
    return folder


def assert_same_arrays(state, other):
    for a, b in zip(arrays_of(state), arrays_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("old", "new"),
    [("fully_sharded", name) for name in LAYOUTS] + [("sequence_parallel", "fully_sharded")],
)
def test_every_array_comes_back_under_another_layout(folder, states, mesh, old, new):
    layout = LAYOUTS[new]
    other = started([functools.partial(layout.recipe, mesh=mesh)], 1)
    plan = layout.plan(other, mesh)
    restored = restore_train_state(folder / old, other, plan=plan)
    assert_same_arrays(restored, states[old])
    assert pz.select(restored.model).at_instances_of(AxesInPlace).count() == 1
    shardings = jax.tree.leaves(plan.sharding_tree())
    laid_out = jax.tree.leaves(restored)
    assert all(
        a.sharding.is_equivalent_to(s, a.ndim) for a, s in zip(laid_out, shardings, strict=True)
    )


def test_a_declared_sharding_tree_is_of_the_edited_state(folder, states, mesh):
    other = started([functools.partial(LAYOUTS["tensor_parallel"].recipe, mesh=mesh)], 1)
    shardings = LAYOUTS["tensor_parallel"].plan(other, mesh).sharding_tree()
    restored = restore_train_state(folder / "fully_sharded", other, shardings=shardings)
    assert_same_arrays(restored, states["fully_sharded"])


FURTHER = {
    "bare": [],
    "jitted": [jit_root()],
    "rematerialised": [rematerialise_blocks(TransformerBlock)],
    "a layer of somebody else's": [
        Recipe(
            insert_after(TransformerBlock, pz.nn.Identity()),
            wrap(pz.nn.Attention, Around),
        )
    ],
}


@pytest.mark.parametrize("new", FURTHER)
def test_other_edits_of_the_model_do_not_count(folder, states, mesh, new):
    other = started(FURTHER[new], 1)
    restored = restore_train_state(folder / "fully_sharded", other, mesh, {})
    assert_same_arrays(restored, states["fully_sharded"])


def test_a_stack_is_restored_rolled_or_not(tmp_path, mesh):
    plain = started([], 0, use_layer_stack=True)
    rolled = started([roll_layer_stacks()], 1, use_layer_stack=True)
    save_train_state(tmp_path / "state", plain)
    restored = restore_train_state(tmp_path / "state", rolled, mesh, {})
    assert pz.select(restored.model).at_instances_of(RolledLayerStack).count() == 1
    assert_same_arrays(restored, plain)


def test_arrays_of_an_inserted_layer_are_kept_apart_from_those_of_the_model(tmp_path, mesh):
    scaled = Recipe(insert_after(TransformerBlock, pz.nn.ConstantRescale(by=jnp.float32(2.0))))
    state = started([scaled], 0)
    save_train_state(tmp_path / "state", state)
    records = read_manifest(tmp_path / "state").records
    names = [name for name in records if name.startswith("inserted/")]
    assert len(names) == 2
    assert_same_arrays(restore_train_state(tmp_path / "state", state, mesh, {}), state)
    with pytest.raises(CheckpointMismatchError, match=r"inserted/unbound_model/.*/by"):
        restore_train_state(tmp_path / "state", started([], 1), mesh, {})


def test_a_model_that_was_taken_apart_by_hand_is_saved_as_it_is(tmp_path, mesh):
    around = Recipe(wrap(pz.nn.Attention, Around))
    state = started([around, lambda model: _WithoutOriginals()], 0)
    with pytest.raises(RuleTypeError, match="is not in it any more"):
        strip(state.model)
    save_train_state(tmp_path / "state", state)
    restored = restore_train_state(tmp_path / "state", state, mesh, {})
    assert jax.tree.structure(restored) == jax.tree.structure(state)
