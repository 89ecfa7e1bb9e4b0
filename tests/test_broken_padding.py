"""Padding broken on purpose in each of its steps, which an oracle in NumPy finds; and uses that do
no harm, which pass it."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from treescope import rendering_parts

import penzai_shard as pzs
from penzai_shard import padded_arrays
from penzai_shard.checkpointing import orbax_store, padded_layouts, parameter_dict
from penzai_shard.layers import gather_parameters
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.padded_arrays import PaddedArray
from penzai_shard.placement import placing as placing_of_library
from penzai_shard.placement import stored_padding
from penzai_shard.planning import LeafPlan
from penzai_shard.surgery.equivalence import comparable_arrays
from penzai_shard.training import batches, state_placement, train_step
from tests.padding_claims import (
    CLAIMS,
    MESH,
    OTHER,
    RULES,
    TRUE,
    X,
    assert_placed,
    assert_trained,
    assert_true,
    batch,
    by_hand,
    close,
    loss_fn,
    loss_of,
    placed,
    plain,
    state_of,
    training,
)


def check(claim, folder):
    CLAIMS[claim](*[folder] if claim == "saving" else [])


@pytest.mark.parametrize("claim", list(CLAIMS))
def test_the_oracle_agrees_with_what_is_not_broken(claim, tmp_path):
    check(claim, tmp_path)


# What is broken, and what the oracle says of it.


def padding_with_ones(data, shape):
    widths = [(0, want - have) for want, have in zip(shape, np.shape(data), strict=True)]
    xp = jnp if isinstance(data, jax.Array) else np
    return xp.pad(data, widths, constant_values=1)


def padding_in_front(data, shape):
    widths = [(want - have, 0) for want, have in zip(shape, np.shape(data), strict=True)]
    return (jnp if isinstance(data, jax.Array) else np).pad(data, widths)


def padding_in_float32(data, shape):
    return PAD_TO(data.astype(np.float32), shape)


PAD_TO = padded_arrays.pad_to


def unchanged(value, *_):
    return value


def of_padded(change):
    """A function of a tree, and of what else, that changes its padded arrays alone."""

    def changed(tree, *_):
        is_padded = padded_arrays.is_padded
        return jax.tree.map(lambda n: change(n) if is_padded(n) else n, tree, is_leaf=is_padded)

    return changed


def with_stored_lengths(node):
    return pz.nx.NamedArray(
        dict(zip(node.named_axes, node.padding.lengths, strict=True)), node.stored
    )


def with_zeros_behind(node):
    inside = PAD_TO(jnp.ones(tuple(node.named_axes.values())), node.stored.shape)
    return PaddedArray(node.stored * inside, node.named_axes, node.padding)


def cut_short(stored, shape, *_):
    return jax.lax.slice(stored, (0,) * len(shape), shape).at[..., -1].set(0.0)


def cut_with_a_slope_behind(stored, shape, *_):
    true = jax.lax.slice(stored, (0,) * len(shape), shape)
    behind = stored.sum() - true.sum()
    return true + (behind - jax.lax.stop_gradient(behind))


def cut_that_reads_padding(stored, shape, *_):
    return jax.lax.slice(stored, (0,) * len(shape), shape) + 0 * stored.sum()


def whole_on_each_device(called, data, shape, layout):
    return jax.device_put(PAD_TO(np.asarray(data), shape), NamedSharding(layout.mesh, P()))


def put_on_each_device(values, *_):
    return jax.device_put(values, NamedSharding(MESH, P()))


def padding_in_front_on_devices(called, data, shape, layout):
    return jax.device_put(padding_in_front(np.asarray(data), shape), layout)


def padding_in_front_of_parts(data, shape, layout):
    return padding_in_front_on_devices("", data, shape, layout)


def other_true_length(node, data, padding):
    return PaddedArray(data, {name: size + 1 for name, size in node.named_axes.items()}, padding)


def stored_as(lengths):
    """A plan that says other stored lengths."""

    def padding(leaf):
        return FOUND(leaf) and dataclasses.replace(FOUND(leaf), lengths=lengths[leaf.path])

    return property(padding)


FOUND = LeafPlan.padding.fget


def leaf_with_stored_lengths(leaf):
    if leaf.padding is None:
        return leaf
    return dataclasses.replace(leaf, shape=tuple(leaf.array.shape), padding=None)


def leaf_without_its_end(leaf):
    true = WITHOUT_PADDING(leaf)
    if leaf.padding is None:
        return true
    return dataclasses.replace(true, array=true.array.at[..., -1].set(0.0))


def without_end(leaf):
    return TRANSPOSED(leaf)[..., :-1]


TRANSPOSED = comparable_arrays._transposed
WITHOUT_PADDING = NamedLeaf.without_padding

# The claim; what the oracle, or a check, says; and what is put in place of what.
BROKEN = {
    "padding is one": (
        "placing", "part of a device", (stored_padding, "pad_to", padding_with_ones)),
    "padding is in front": (
        "placing", "true values", (stored_padding, "pad_to", padding_in_front)),
    "padding changes the dtype": (
        "placing", "dtype", (stored_padding, "pad_to", padding_in_float32)),
    "every device has all": (
        "placing", "bytes on", (placing_of_library, "_device_put", put_on_each_device)),
    "true lengths are off by one": (
        "placing", "Mismatch custom node data", (stored_padding, "stored_with", other_true_length)),
    "one of two dimensions is forgotten": (
        "placing", "dimension size is 7",
        (LeafPlan, "padding", stored_as({"weights": (8, 7), "bias": (8,)}))),
    "another dimension is padded": (
        "placing", "dimension size is 5",
        (LeafPlan, "padding", stored_as({"weights": (5, 8), "bias": (8,)}))),
    "more is padded than needed": (
        "placing", "stored lengths",
        (LeafPlan, "padding", stored_as({"weights": (16, 8), "bias": (8,)}))),
    "the last numbers are cut off": (
        "placing", "true values", (padded_arrays, "_cut_outside", cut_short)),
    "parameters are given out padded": (
        "placing", "what is given out", (parameter_dict, "_true_value", unchanged)),
    "treescope shows what is stored": (
        "placing", "what is shown",
        (PaddedArray, "__treescope_repr__", lambda self, *_: rendering_parts.text("8, 8"))),
    "the last numbers are cut off in programs": (
        "differentiating", "true values", (padded_arrays, "_cut", cut_short)),
    "padding has a gradient": (
        "differentiating", "part of a device", (padded_arrays, "_cut", cut_with_a_slope_behind)),
    "padding is computed with": (
        "differentiating", "other padding", (padded_arrays, "_cut", cut_that_reads_padding)),
    "a layer has what is stored": (
        "wrapping", "size 5 does not match expected 8",
        (gather_parameters, "without_padding", of_padded(with_stored_lengths))),
    "padding is one after a step": (
        "training", "part of a device", (padded_arrays, "pad_to", padding_with_ones)),
    "the optimizer updates padding": (
        "training", "true values",
        (train_step, "without_padding", unchanged), (train_step, "padded_as", unchanged)),
    "the optimizer's norms count padding": (
        "training", "true values",
        (train_step, "without_padding", unchanged),
        (train_step, "padded_as", of_padded(with_zeros_behind))),
    "the optimizer's state is not padded": (
        "training", "subtree of different type", (state_placement, "padded_as", unchanged)),
    "batches are padded": ("batching", "DID NOT RAISE", (batches, "refuse_uneven", unchanged)),
    "equivalence compares what is stored": (
        "certifying", "the same model", (NamedLeaf, "without_padding", leaf_with_stored_lengths)),
    "equivalence does not look at the end": (
        "certifying", "another model", (comparable_arrays, "_transposed", without_end)),
    "checkpoints have the stored lengths": (
        "saving", "saved lengths", (orbax_store, "leaf_to_save", leaf_with_stored_lengths)),
    "checkpoints lack the end": (
        "saving", "saved values", (orbax_store, "leaf_to_save", leaf_without_its_end)),
    "what is restored is padded in front": (
        "saving", "true values",
        (padded_layouts, "padded_on_devices", padding_in_front_on_devices)),
    "what is restored is whole on each device": (
        "saving", "bytes on", (padded_layouts, "padded_on_devices", whole_on_each_device)),
    "what is restored through the host is padded in front": (
        "saving", "true values", (padded_layouts, "padded_parts", padding_in_front_of_parts)),
}  # fmt: skip


@pytest.fixture
def forgotten():
    """What was compiled of padded arrays is not used again, nor what is broken used elsewhere."""
    caches = (padded_arrays._cut_to, stored_padding._padding_to)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("what", list(BROKEN))
def test_what_is_broken_is_found(what, monkeypatch, tmp_path):
    claim, says, *changes = BROKEN[what]
    for place, name, other in changes:
        monkeypatch.setattr(place, name, other)
    with pytest.raises((Exception, pytest.fail.Exception), match=says):
        check(claim, tmp_path)


# What does no harm.


def shardings_of(state):
    return pzs.train_state_sharding(state, MESH, RULES, on_indivisible="pad")


def in_a_loop():
    step = pzs.build_train_step_fn(loss_fn)

    def once(state, _):
        state, aux = step(state, x=batch())
        return state, aux["loss"]

    assert_trained(*jax.jit(lambda s: jax.lax.scan(once, s, None, length=2))(state_of(placed())))


def rematerialised():
    gradients = jax.jit(jax.grad(jax.checkpoint(loss_of)))(placed(), batch())
    slope = 2 * (X @ TRUE["weights"] + TRUE["bias"]) / 56
    assert_placed(gradients, {"weights": X.T @ slope, "bias": slope.sum(0)})


def vectorised():
    both = jax.tree.map(lambda x: jnp.stack([x, x]), placed())
    losses = jax.jit(jax.vmap(loss_of, (0, None)))(both, batch())
    close(losses, by_hand(1)[0] * 2, "losses of stacked parameters")


def on_an_explicit_mesh():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        assert_placed(placed(explicit))


def as_planned():
    plan = pzs.make_plan(jax.eval_shape(plain), MESH, RULES, on_indivisible="pad")
    assert_placed(pzs.place(plain(), plan))
    assert sum(leaf.bytes_per_device for leaf in plan.leaves) == (2 * 4 + 4) * 4


def on_one_device():
    mesh = pzs.make_mesh({"data": 1, "model": 1}, jax.devices()[:1])
    assert_placed(placed(mesh), mesh=mesh)


def evaluated():
    loss, _ = pzs.build_eval_step_fn(loss_fn)(state_of(placed()), x=batch())
    close(loss, by_hand(1)[0][0], "loss of an evaluation")


def restored_with_its_state(folder):
    state = state_of(placed())
    path = pzs.save_train_state(folder / "state", state)
    again = pzs.restore_train_state(path, state, OTHER, RULES, on_indivisible="pad")
    assert_placed(again.params, mesh=OTHER)


def restored_whole(folder):
    path = pzs.save_params(folder / "padded", placed())
    for name, value in pzs.restore_params(path, plain(), MESH, {}).items():
        assert type(value) is pz.nx.NamedArray
        assert_true(value, TRUE[name])


def replaced():
    given = {name: value * 1 for name, value in plain().items()}
    assert_placed(pzs.with_params(placed(), given))


HARMLESS = {
    "numbers of JAX": lambda: assert_placed(
        pzs.place(jax.tree.map(jnp.asarray, plain()), MESH, RULES, on_indivisible="pad")
    ),
    "padded already": lambda: assert_placed(
        pzs.place(placed(), MESH, RULES, on_indivisible="pad")
    ),
    "from another mesh": lambda: assert_placed(
        pzs.place(placed(OTHER), MESH, RULES, on_indivisible="pad")
    ),
    "initialised": lambda: assert_placed(
        pzs.sharded_init(
            lambda: jax.tree.map(jnp.asarray, plain()), mesh=MESH, rules=RULES, on_indivisible="pad"
        )
    ),
    "as planned": as_planned,
    "an explicit mesh": on_an_explicit_mesh,
    "one device": on_one_device,
    "pickled": lambda: assert_placed(
        pzs.place(pickle.loads(pickle.dumps(jax.device_get(placed()))), MESH, RULES,
                  on_indivisible="pad")
    ),
    "copied": lambda: assert_placed(jax.tree.map(jnp.copy, placed())),
    "put where it is": lambda: assert_placed(
        jax.device_put(placed(), jax.tree.map(lambda x: x.sharding, placed()))
    ),
    "other values": replaced,
    "vectorised": vectorised,
    "rematerialised": rematerialised,
    "donated": lambda: training(donate_params_and_state=True),
    "microbatches": lambda: training(accumulate_steps=2),
    "guarded": lambda: training(clip_global_norm=0.5, step_metrics=("gradient_norm",)),
    "declared": lambda: training(train_state_shardings=shardings_of(state_of(placed()))),
    "in a loop": in_a_loop,
    "evaluated": evaluated,
    "restored with its state": restored_with_its_state,
    "restored whole": restored_whole,
}  # fmt: skip


@pytest.mark.parametrize("what", list(HARMLESS))
def test_what_does_no_harm_passes(what, tmp_path):
    use = HARMLESS[what]
    use(*[tmp_path] if what.startswith("restored") else [])
