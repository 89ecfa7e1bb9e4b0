"""What is claimed of arrays that are stored padded, each judged by NumPy, on one device.

The oracle shares no code with what it judges.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import treescope
from penzai import pz

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 4, "model": 2})
OTHER = pzs.make_mesh({"data": 2, "model": 4})
RULES = {"in": "data", "out": "model"}
SPLIT = {"weights": ("data", "model"), "bias": ("model",), "rows": ("data", "model")}
SIZES = {"weights": (5, 7), "bias": (7,)}

TRUE = {name: np.sin(np.arange(np.prod(n)) + 1.0).reshape(n) for name, n in SIZES.items()}
TRUE = {name: value.astype(np.float32) for name, value in TRUE.items()}
X = np.cos(np.arange(8 * 5)).reshape(8, 5).astype(np.float32)


def by_hand(steps):
    """Losses, parameters and momenta of ``HOSTILE``, written out."""
    values, momenta, losses = dict(TRUE), {n: np.zeros_like(v) for n, v in TRUE.items()}, []
    for _ in range(steps):
        y = X @ values["weights"] + values["bias"]
        losses.append(np.mean(y**2))
        slope = 2 * y / y.size
        gradients = {"weights": X.T @ slope, "bias": slope.sum(0)}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, gradient in gradients.items():
            update = gradient * min(1, 0.5 / norm) + 1
            update = update / max(1, np.sqrt((update**2).mean()) / 0.3)
            momenta[name] = update + 0.9 * momenta[name]
            values[name] = values[name] - 0.1 * (momenta[name] + 0.1 * values[name])
    return losses, values, momenta


# Its updates of zeros are not zero, and depend on how many numbers there are.
HOSTILE = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.stateless(lambda updates, _: jax.tree.map(lambda g: g + 1, updates)),
    optax.clip_by_block_rms(0.3),
    optax.trace(0.9),
    optax.add_decayed_weights(0.1),
    optax.scale(-0.1),
)


def close(found, expected, what):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=what)


def assert_stored(array, true, split, mesh=MESH):
    """Each device has its equal part, of the true values and zeros behind them."""
    parts = [mesh.shape[axis] for axis in split]
    own = [-(-n // count) for n, count in zip(true.shape, parts, strict=True)]
    whole = np.zeros([n * count for n, count in zip(own, parts, strict=True)], true.dtype)
    whole[tuple(map(slice, true.shape))] = true
    (stored,) = jax.tree.leaves(array)
    assert stored.dtype == true.dtype, "dtype"
    assert stored.shape == whole.shape, "stored lengths"
    for shard in stored.addressable_shards:
        place = dict(
            zip(mesh.axis_names, np.argwhere(mesh.devices == shard.device)[0], strict=True)
        )
        begins = [place[axis] * n for axis, n in zip(split, own, strict=True)]
        index = tuple(slice(i, i + n) for i, n in zip(begins, own, strict=True))
        assert shard.data.nbytes == np.prod(own) * true.dtype.itemsize, "bytes on a device"
        close(np.asarray(shard.data), whole[index], "part of a device")


def assert_true(array, true):
    """To everything that computes with it, an array has its true lengths and values."""
    assert tuple(array.named_shape.values()) == true.shape, "true lengths"
    close(array.unwrap(*array.named_shape), true, "true values")


def assert_placed(tree, values=TRUE, mesh=MESH):
    for name, true in values.items():
        assert_true(tree[name], true)
        assert_stored(tree[name], true, SPLIT[name], mesh)


def plain(values=TRUE, dtype=np.float32):
    names = {1: ("out",), 2: ("in", "out")}
    return {
        name: pz.nx.wrap(value.astype(dtype), *names[value.ndim]) for name, value in values.items()
    }


def placed(mesh=MESH, **given):
    return pzs.place(plain(**given), mesh, RULES, on_indivisible="pad")


def loss_of(model, x):
    y = (model["weights"] * x).untag("in").sum() + model["bias"]
    return jnp.mean(y.untag("batch", "out").unwrap() ** 2)


def loss_fn(model, rng, state, x):
    loss = loss_of(model, x)
    return loss, state, {"loss": loss}


def batch(examples=8):
    return pz.nx.wrap(X[:examples], "batch", "in")


def state_of(model):
    return pzs.TrainState.initial_state(model, HOSTILE, jax.random.key(0))


def placing():
    model = placed()
    assert_placed(model)
    assert_placed(placed(OTHER), mesh=OTHER)
    assert "in:5, out:7" in treescope.render_to_text(model["weights"]), "what is shown"
    for name, value in pzs.param_dict(model).items():
        assert type(value) is pz.nx.NamedArray, "what is given out"
        assert_true(value, TRUE[name])
    (leaf,) = jax.tree.leaves(placed(dtype=np.float16)["bias"])
    assert leaf.dtype == np.float16, "dtype"


def differentiating():
    gradients = jax.jit(jax.grad(loss_of))(placed(), batch())
    slope = 2 * (X @ TRUE["weights"] + TRUE["bias"]) / 56
    assert_placed(gradients, {"weights": X.T @ slope, "bias": slope.sum(0)})
    behind = np.full((8, 8), np.nan, np.float32)
    behind[:5, :7] = TRUE["weights"]
    model = placed()
    model["weights"] = jax.tree.map(lambda x: jax.device_put(behind, x.sharding), model["weights"])
    close(loss_of(model, batch()), by_hand(1)[0][0], "loss with other padding")
    in_program = jax.jit(lambda model: loss_of(model, batch()))
    close(in_program(model), by_hand(1)[0][0], "loss with other padding")


def assert_trained(state, losses, steps=2, mesh=MESH):
    expected, values, momenta = by_hand(steps)
    close(losses, expected, "losses")
    assert_placed(state.params, values, mesh)
    assert_placed(state.opt_state[3].trace, momenta, mesh)


def training(**options):
    state, losses = state_of(placed()), []
    assert_placed(state.opt_state[3].trace, {n: np.zeros_like(v) for n, v in TRUE.items()})
    step = pzs.build_train_step_fn(loss_fn, **options)
    for _ in range(2):
        state, aux = step(state, x=batch())
        losses.append(float(aux["loss"]))
    assert_trained(state, losses)
    return state


def saving(folder):
    # Of the last one another length divides.
    values = TRUE | {"rows": np.arange(72, dtype=np.float32).reshape(9, 8)}
    path = pzs.save_params(folder / "padded", placed(values=values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax takes the layout from the file.
        by_orbax = ocp.load(path)
    for name, value in by_orbax.items():
        assert value.shape == values[name].shape, "saved lengths"
        close(value, values[name], "saved values")
    for mesh in (MESH, OTHER):
        restored = pzs.restore_params(path, plain(values), mesh, RULES, on_indivisible="pad")
        assert_placed(restored, values, mesh)


def batching():
    trainer = pzs.StatefulTrainer.build(
        jax.random.key(0),
        plain(),
        HOSTILE,
        loss_fn,
        mesh=MESH,
        rules={"out": "model", "batch": "data"},
        on_indivisible="pad",
    )
    with pytest.raises(pzs.ShardingError, match="and batches are not"):
        trainer.step(x=batch(6))


def affine():
    return pz.nn.Affine.from_config("mlp", jax.random.key(0), {"in": 5}, {"out": 7})


def wrapping():
    x = pz.nx.wrap(X[0], "in")
    model = pzs.place(affine(), MESH, RULES, on_indivisible="pad")
    values = {name: np.asarray(value.data_array) for name, value in pzs.param_dict(model).items()}
    expected = X[0] @ values["mlp/Linear.weights"] + values["mlp/AddBias.bias"]
    gathered = pzs.GatherParameters(model, MESH, {"out": "model"}, on_indivisible="pad")
    close(gathered(x).unwrap("out"), expected, "gathered on use")
    half = pzs.InPrecision(model, "bfloat16")(x).unwrap("out")
    np.testing.assert_allclose(half, expected, rtol=0.02, atol=0.02)


def certifying():
    x = pz.nx.ones({"in": 5})
    certified = functools.partial(pzs.check_equivalent, affine(), gradients=False)
    model = pzs.place(affine(), MESH, RULES, on_indivisible="pad")
    assert certified(model, x), "the same model"
    values = pzs.param_dict(model)
    name = "mlp/Linear.weights"
    values[name] = values[name].at[{"in": 4, "out": 6}].add(1.0).order_as("in", "out")
    assert not certified(pzs.with_params(model, values), x), "another model"


CLAIMS = {
    "placing": placing,
    "differentiating": differentiating,
    "wrapping": wrapping,
    "training": training,
    "batching": batching,
    "certifying": certifying,
    "saving": saving,
}
