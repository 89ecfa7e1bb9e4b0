"""The step that computes loss and gradients per device, against that of the compiler."""

import collections
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from penzai import pz
from penzai.models.simple_mlp import MLP

from benchmarks.compiled_collectives import read_collectives
from penzai_shard import fully_sharded, name_axes, place, without_names
from penzai_shard.errors import MeshError, RuleTypeError, ShardingError
from penzai_shard.meshes import make_mesh
from penzai_shard.training import (
    StatefulTrainer,
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

MESH = make_mesh({"data": 4, "model": 2})
ALL = make_mesh({"data": 8})
LAYOUTS = {
    "data parallel": {},
    "fully sharded": fully_sharded("data", 2),
    "tensor parallel": {"features_out": "model"},
    "both": {"features": "data", "features_out": "model"},
}
WEIGHTS = 4  # Two matrices and two biases.


def optimizer():
    # Some of the gradients are longer than that, and some are not.
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def mlp():
    return MLP.from_config(name="mlp", init_base_rng=jax.random.key(0), feature_sizes=(8, 16, 8))


def batch(size=16):
    def named(key):
        values = jax.random.normal(jax.random.key(key), (size, 8))
        return pz.nx.wrap(values, "batch", "features")

    return {"x": named(1), "y": named(2)}


def loss_fn(model, rng, state, x, y):
    error = model(x).untag("features", "batch") - y.untag("features", "batch")
    loss = jnp.mean(error.unwrap() ** 2)
    return loss, state, {"loss": loss}


def linear_loss(model, rng, state, x, y):
    """A loss of few operations, for a model ``{"w": ...}``."""
    loss = jnp.mean((x.unwrap("batch", "features") * model["w"]) ** 2)
    return loss, state, {"loss": loss}


def on_mesh(model, rules=None, mesh=MESH, optimizer_def=None, optimizer_rules=None, **options):
    """A train state, laid out, and its shardings."""
    made = optimizer_def or optimizer()
    state = TrainState.initial_state(model, made, jax.random.key(3), **options)
    shardings = train_state_sharding(
        state, mesh, rules or {}, optimizer_rules=optimizer_rules, on_unnamed="replicate"
    )
    return jax.device_put(state, shardings), shardings


def trained(rules, steps=16, mesh=MESH, loss_fn=loss_fn, optimizer_def=None, **options):
    """The last state, and the losses on the way."""
    state, shardings = on_mesh(mlp(), rules, mesh, optimizer_def)
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings, **options)
    placed = shard_batch(batch(), mesh, {"batch": "data"})
    losses = []
    for _ in range(steps):
        state, aux = step(state, **placed)
        losses.append(float(aux["loss"]))
    return state, losses


def check_same(found, expected):
    (found_state, found_losses), (state, losses) = found, expected
    np.testing.assert_allclose(found_losses, losses, rtol=2e-5)
    for path, value in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        have = dict(
            jax.tree_util.tree_leaves_with_path((found_state.params, found_state.opt_state))
        )[path]
        np.testing.assert_allclose(have, value, rtol=1e-3, atol=2e-6, err_msg=str(path))


@pytest.fixture(scope="module")
def alone():
    """Trained on one device."""
    state = TrainState.initial_state(mlp(), optimizer(), jax.random.key(3))
    step = build_train_step_fn(loss_fn)
    losses = []
    for _ in range(16):
        state, aux = step(state, **batch())
        losses.append(float(aux["loss"]))
    return state, losses


@pytest.mark.parametrize("rules", LAYOUTS.values(), ids=LAYOUTS)
def test_sixteen_steps_equal_those_of_one_device(alone, rules):
    found = trained(rules, manual_axes=("data",))
    assert found[1][-1] < 0.9 * found[1][0]
    check_same(found, alone)


def test_sixteen_steps_equal_those_of_the_automatic_step_in_the_same_layout():
    rules = LAYOUTS["both"]
    found, automatic = trained(rules, manual_axes=("data",)), trained(rules)
    check_same(found, automatic)
    for name, value in automatic[0].params.items():
        assert found[0].params[name].data_array.sharding == value.data_array.sharding


def compiled(rules, manual=("data",), mesh=MESH, optimizer_rules=None, **options):
    state, shardings = on_mesh(mlp(), rules, mesh, optimizer_rules=optimizer_rules)
    step = build_train_step_fn(
        loss_fn, train_state_shardings=shardings, manual_axes=manual, **options
    )
    placed = shard_batch(batch(), mesh, {"batch": manual})
    return read_collectives(step.lower(state, **placed).compile(), mesh)


def kinds(collectives):
    return collections.Counter((one.kind, one.mesh_axes) for one in collectives)


@pytest.mark.parametrize("parts", [1, 2])
def test_data_parallel_moves_one_combined_all_reduce(parts):
    found = compiled({}, accumulate_steps=parts)
    assert kinds(found) == {("all-reduce", ("data",)): 1}
    assert found[0].times == 1
    # All gradients, and the loss.
    assert found[0].payload_bytes == 4 * (2 * 8 * 16 + 16 + 8 + 1)


def test_fully_sharded_gathers_parameters_and_scatters_gradients():
    found = compiled(LAYOUTS["fully sharded"])
    count = kinds(found)
    assert count["all-gather", ("data",)] == count["reduce-scatter", ("data",)] == WEIGHTS
    # The loss and the norm that gradients are clipped by.
    left = [one for one in found if one.kind not in ("all-gather", "reduce-scatter")]
    assert {one.kind for one in left} == {"all-reduce"}
    assert sum(one.payload_bytes for one in left) <= 4 * (WEIGHTS + 1)


def test_with_tensor_parallelism_parameters_are_moved_over_the_data_axis_alone():
    count = kinds(compiled(LAYOUTS["both"]))
    # The first bias is split over the model axis alone, the last by nothing.
    assert count["all-gather", ("data",)] >= 1
    assert count["reduce-scatter", ("data",)] == count["all-gather", ("data",)]
    assert not any(kind == "all-to-all" for kind, _ in count)


def test_gradients_are_scattered_to_where_the_optimizer_keeps_its_part():
    """ZeRO-2: the parameters are whole, and what the optimizer keeps is split."""
    found = compiled({}, optimizer_rules=fully_sharded("data", 2))
    count = kinds(found)
    assert count["reduce-scatter", ("data",)] == WEIGHTS
    assert count["all-gather", ("data",)] == WEIGHTS
    whole = [one for one in found if one.kind == "all-reduce"]
    assert sum(one.payload_bytes for one in whole) <= 4 * (WEIGHTS + 1)


def test_gradients_are_scattered_within_a_node_and_added_up_across():
    mesh = make_mesh({"replica": 2, "data": 4})
    count = kinds(compiled(fully_sharded("data", 2), ("replica", "data"), mesh))
    assert count["all-gather", ("data",)] == count["reduce-scatter", ("data",)] == WEIGHTS
    assert count["all-reduce", ("replica",)] == 1


@pytest.mark.parametrize("rules", [{}, fully_sharded("data", 2)], ids=["whole", "split"])
def test_microbatches_are_of_the_local_batch_and_equal_those_of_the_automatic_step(rules):
    found = trained(rules, 4, accumulate_steps=2, manual_axes="data")
    check_same(found, trained(rules, 4, accumulate_steps=2))


# Every two of them together once: the kind, what is left to the compiler, how weights are stored.
@pytest.mark.parametrize(
    ("kind", "mesh", "rules"),
    [
        ("mean", MESH, {"features": "data"}),
        ("mean", ALL, {}),
        ("quotient", MESH, {}),
        ("quotient", ALL, {"features": "data"}),
        ("pair", MESH, {}),
        ("pair", ALL, {"features": "data"}),
    ],
)
def test_a_loss_that_averages_over_the_devices_itself_has_the_same_gradient(kind, mesh, rules):
    """As guides to shard_map write it."""

    def averaged(over_devices, model, rng, state, x, y):
        x, y = (value.unwrap("batch", "features") for value in (x, y))
        errors = (x * model["w"].unwrap("features") - y) ** 2
        counts = (y > 0.5).astype(errors.dtype)
        if kind == "mean":
            return over_devices(errors.mean()) / over_devices(1.0), state, {}
        total, count = over_devices((errors * counts).sum()), over_devices(counts.sum())
        return (total / count if kind == "quotient" else (total, count)), state, {}

    results = []
    for over_devices, options in (
        (lambda value: jax.lax.psum(value, "data"), {"manual_axes": "data"}),
        (lambda value: value, {}),
    ):
        weights = pz.nx.wrap(jnp.linspace(-1, 1, 8), "features")
        state, _ = on_mesh({"w": weights}, rules, mesh, optax.sgd(0.5))
        step = build_train_step_fn(
            functools.partial(averaged, over_devices), step_metrics="loss", **options
        )
        state, aux = step(state, **shard_batch(batch(), mesh, {"batch": "data"}))
        results.append((state.params["w"].data_array, aux["loss"]))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def asking_optimizer():
    """One that asks for the loss, and for loss and gradient at other parameters."""

    def update(grads, state, params, *, value, value_fn, grad_fn, **_):
        there = optax.apply_updates(params, optax.tree.scale(-0.1, grads))
        step = 0.1 * value + 0.2 * value_fn(there)
        return optax.tree.scale(-step, grad_fn(there)), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def test_optimizers_that_ask_for_the_loss_get_that_of_the_whole_batch():
    rules = LAYOUTS["fully sharded"]
    found = trained(rules, 3, optimizer_def=asking_optimizer(), manual_axes="data")
    check_same(found, trained(rules, 3, optimizer_def=asking_optimizer()))


def test_guards_see_the_gradient_of_the_whole_batch():
    """Half precision, too, where XLA's compiler for CPUs cannot add up what it splits itself."""

    def linear(model, rng, state, x, y):
        product = x.unwrap("batch", "features").astype(jnp.float16) @ model["w"].unwrap(
            "features", "out"
        ).astype(jnp.float16)
        return jnp.mean(product * model["scale"].astype(jnp.float16)), state, {}

    weights = {"w": pz.nx.wrap(jnp.ones((8, 8)), "features", "out"), "scale": jnp.ones(8)}
    guards = {
        "loss_scaling": "dynamic",
        "clip_global_norm": 0.01,
        "skip_nonfinite": True,
        "step_metrics": ("loss", "gradient_norm", "loss_scale"),
    }
    found = []
    for options in ({"manual_axes": "data"}, {}):
        state, shardings = on_mesh(
            weights,
            {"features": "data", "out": "model"},
            optimizer_def=optax.sgd(0.1),
            loss_scaling="dynamic",
            skip_nonfinite=True,
        )
        step = build_train_step_fn(linear, train_state_shardings=shardings, **guards, **options)
        found.append(step(state, **shard_batch(batch(), MESH, {"batch": "data"})))
    (state, metrics), (expected, expected_metrics) = found
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=5e-3, err_msg=name)
    for name, value in expected.params.items():
        for have, want in zip(*map(jax.tree.leaves, (state.params[name], value)), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4)


class TestCompilation:
    def test_one_compilation_serves_all_steps_and_donates(self):
        traces = []

        def counted(model, rng, state, x, y):
            traces.append(1)
            return loss_fn(model, rng, state, x, y)

        state, shardings = on_mesh(mlp(), LAYOUTS["fully sharded"])
        step = build_train_step_fn(
            counted,
            train_state_shardings=shardings,
            donate_params_and_state=True,
            manual_axes="data",
        )
        placed = shard_batch(batch(), MESH, {"batch": "data"})
        for _ in range(3):
            before = state
            weight = state.params["mlp/Affine_0/Linear.weights"].data_array
            state, _ = step(before, **placed)
            assert weight.is_deleted()
        assert len(traces) == 1
        (program,) = step._programs.values()
        assert program.run._cache_size() == 1

    def test_explicit_meshes_mean_their_auto_twin(self, alone):
        kinds = (AxisType.Explicit,) * 2
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
        rules = LAYOUTS["both"]
        losses = trained(rules, 2, mesh, manual_axes="data")[1]
        np.testing.assert_allclose(losses, alone[1][:2], rtol=1e-5)

    @pytest.mark.parametrize(
        ("mesh", "rules"),
        [
            (make_mesh({"data": 8}), {"features": "data"}),
            # What is left to the compiler is compiled all the same.
            (MESH, {"features": "data", "out": "model"}),
        ],
        ids=["all manual", "both"],
    )
    def test_without_compilation_it_is_the_same(self, mesh, rules):
        weights = pz.nx.wrap(jnp.linspace(-1, 1, 64).reshape(8, 8), "features", "out")
        placed = shard_batch(batch(), mesh, {"batch": "data"})

        def linear(model, rng, state, x, y):
            product = x.unwrap("batch", "features") @ model["w"].unwrap("features", "out")
            return jnp.mean(product**2), state, {"loss": jnp.mean(product**2)}

        results = []
        for jit in (True, False):
            state, _ = on_mesh({"w": weights}, rules, mesh, optax.sgd(0.1))
            step = build_train_step_fn(linear, jit=jit, manual_axes="data")
            state, aux = step(state, **placed)
            results.append((state.params["w"].data_array, aux["loss"]))
        for compiled_one, eager in zip(*results, strict=True):
            np.testing.assert_allclose(compiled_one, eager, rtol=1e-5)
            assert compiled_one.sharding == eager.sharding

    def test_inside_of_another_compiled_function_layouts_are_declared(self, alone):
        state, shardings = on_mesh(mlp(), LAYOUTS["fully sharded"])
        step = build_train_step_fn(loss_fn, train_state_shardings=shardings, manual_axes="data")
        placed = shard_batch(batch(), MESH, {"batch": "data"})
        _, aux = jax.jit(lambda state: step(state, **placed))(state)
        np.testing.assert_allclose(aux["loss"], alone[1][0], rtol=1e-5)
        undeclared = build_train_step_fn(loss_fn, manual_axes="data")
        with pytest.raises(ShardingError, match="is on none that is known here"):
            jax.jit(lambda state: undeclared(state, **placed))(state)

    def test_a_mesh_of_one_device_will_do(self, alone):
        mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        losses = trained({}, 2, mesh, manual_axes="data")[1]
        np.testing.assert_allclose(losses, alone[1][:2], rtol=1e-5)

    def test_a_trainer_passes_it_on(self, alone):
        trainer = StatefulTrainer.build(
            root_rng=jax.random.key(3),
            model=mlp(),
            optimizer_def=optimizer(),
            loss_fn=loss_fn,
            mesh=MESH,
            rules=fully_sharded("data", 2) | {"batch": "data"},
            manual_axes="data",
        )
        losses = [float(trainer.step(**batch())["loss"]) for _ in range(2)]
        np.testing.assert_allclose(losses, alone[1][:2], rtol=1e-5)


class TestRandomNumbers:
    def test_shards_draw_numbers_of_their_own(self):
        """Dropout masks differ between shards, and are the same on devices of one shard."""

        def drawing(model, rng, state, x, y):
            size = x.named_shape["batch"]
            drawn = pz.nx.wrap(jax.random.uniform(rng, (size,)), "batch")
            return jnp.mean(model["w"] ** 2), state, {"drawn": drawn, "key": rng}

        state, _ = on_mesh({"w": jnp.ones(8)})
        step = build_train_step_fn(drawing, manual_axes="data", aux_reduction={"key": "last"})
        placed = shard_batch(batch(), MESH, {"batch": "data"})
        state, aux = step(state, **placed)
        folded = jax.random.fold_in(jax.random.key(3), 0)
        keys = [jax.random.fold_in(folded, i) for i in range(4)]
        expected = np.concatenate([jax.random.uniform(key, (4,)) for key in keys])
        np.testing.assert_array_equal(aux["drawn"].unwrap("batch"), expected)
        assert len(set(expected)) == 16
        assert aux["key"] == keys[-1]
        np.testing.assert_raises(
            AssertionError, np.testing.assert_array_equal,
            step(state, **placed)[1]["drawn"].unwrap("batch"), expected,
        )  # fmt: skip

    def test_dropout_of_a_model_is_another_one_on_each_shard(self):
        model = pz.nn.StochasticDropout(0.5)

        def dropping(model, rng, state, x, y):
            stream = pz.RandomStream(rng, offset=pz.StateVariable(0))
            kept = model["dropout"](pz.nx.ones(x.named_shape), random_stream=stream)
            return jnp.mean(model["w"] ** 2), state, kept

        state, _ = on_mesh({"w": jnp.ones(8), "dropout": model})
        placed = shard_batch(batch(), MESH, {"batch": "data"})
        _, kept = build_train_step_fn(dropping, manual_axes="data")(state, **placed)
        masks = np.asarray(kept.unwrap("batch", "features")).reshape(4, 32)
        assert len({mask.tobytes() for mask in masks}) == 4


class TestAuxiliaryOutputs:
    """Each of four devices has two microbatches of two examples."""

    WEIGHTS = np.arange(16.0)

    def aux(self, aux_reduction=None, outputs=None, accumulate_steps=2):
        def reporting(model, rng, state, x):
            values = x.unwrap("batch")
            found = {
                "mean": values.mean(),
                "sum": values.sum(),
                "max": values.max(),
                "min": values.min(),
                "last": values[0],
                "count": jnp.sum(values > 7).astype(jnp.int32),
                "alike": jnp.asarray(7, jnp.int32),
                "examples": 2.0 * x,
            }
            kept = {name: found[name] for name in outputs or found}
            return jnp.mean(values) * model["w"], state, kept

        state, _ = on_mesh({"w": jnp.ones(())}, optimizer_def=optax.sgd(1e-2))
        step = build_train_step_fn(
            reporting,
            manual_axes="data",
            aux_reduction=aux_reduction,
            accumulate_steps=accumulate_steps,
        )
        x = shard_batch({"x": pz.nx.wrap(self.WEIGHTS, "batch")}, MESH, {"batch": "data"})
        return step(state, **x)[1]

    def test_devices_are_put_together_as_microbatches_are(self):
        words = {name: name for name in ("sum", "max", "min", "last")}
        found = self.aux(words | {"count": "sum", "alike": "last"})
        assert float(found["mean"]) == 7.5
        # Per device and microbatch two examples: the mean of sums is not asked for, the sum is.
        assert float(found["sum"]) == 120
        assert float(found["max"]) == 15
        assert float(found["min"]) == 0
        # The first example of the last microbatch of the last device.
        assert float(found["last"]) == 13
        assert int(found["count"]) == 8
        assert int(found["alike"]) == 7

    def test_outputs_with_the_batch_axis_are_put_together_along_it(self):
        found = self.aux(outputs=["examples"], accumulate_steps=1)["examples"]
        np.testing.assert_array_equal(found.unwrap("batch"), 2 * self.WEIGHTS)
        last = self.aux({"examples": "last"}, ["examples"])["examples"]
        np.testing.assert_array_equal(last.unwrap("batch"), 2 * self.WEIGHTS[1::2])

    def test_what_is_the_same_on_all_devices_need_not_be_declared(self):
        found = self.aux(outputs=["alike"], accumulate_steps=1)
        assert int(found["alike"]) == 7
        assert int(self.aux({"alike": "sum"}, ["alike"])["alike"]) == 7 * 8

    def test_outputs_of_a_branch_that_differs_are_averaged_or_refused(self):
        def reporting(kind, model, rng, state, x):
            values = x.unwrap("batch")
            found = jax.lax.cond(values.mean() > 7, lambda: kind(4), lambda: kind(0))
            return jnp.mean(values) * model["w"], state, {"found": found}

        state, _ = on_mesh({"w": jnp.ones(())}, optimizer_def=optax.sgd(1e-2))
        x = shard_batch({"x": pz.nx.wrap(self.WEIGHTS, "batch")}, MESH, {"batch": "data"})
        floating, whole = (
            build_train_step_fn(functools.partial(reporting, kind), manual_axes="data")
            for kind in (jnp.float32, jnp.int32)
        )
        assert float(floating(state, **x)[1]["found"]) == 2.0
        with pytest.raises(ShardingError, match="found: of int32, which is not averaged"):
            whole(state, **x)

    def test_outputs_that_differ_and_are_not_averaged_are_refused(self):
        with pytest.raises(ShardingError, match="outputs of the devices cannot be") as caught:
            self.aux(outputs=["count", "alike"], accumulate_steps=1)
        assert caught.value.problems == (
            "count: of int32, which is not averaged by itself. Say how its 4 values become one: "
            "aux_reduction={'count': 'sum'}, or another of 'mean', 'sum', 'max', 'min', 'last'.",
        )


class TestStates:
    """What the loss carries on is the same on all devices, or refused."""

    def step(self, change, **options):
        def carrying(model, rng, state, x, y):
            mean = jnp.mean(x.unwrap("batch", "features"))
            model["seen"].value, state = change(model["seen"].value, state, mean)
            return model["w"].value * mean, state, {}

        model = {
            "w": pz.Parameter(value=jnp.ones(()), label="w"),
            "seen": pz.StateVariable(value=jnp.zeros(()), label="seen"),
        }
        state, _ = on_mesh(
            model, optimizer_def=optax.sgd(1e-2), loss_fn_state={"count": jnp.zeros((), int)}
        )
        step = build_train_step_fn(carrying, **options)
        return step(state, **shard_batch(batch(), MESH, {"batch": "data"}))[0]

    def test_states_that_differ_are_refused_by_path(self):
        def change(seen, state, mean):
            return seen + mean, {"count": state["count"] + (mean > 0)}

        with pytest.raises(ShardingError, match="a state differs between the devices") as caught:
            self.step(change, manual_axes="data")
        assert caught.value.problems == (
            "state_vars/seen: each device would have another after the step over mesh axis 'data' "
            "(4), as it sees its own examples alone. Make it one in the loss function: "
            "jax.lax.pmean(value, ('data',)), or psum, pmax or pmin; or train without manual_axes.",
            caught.value.problems[1],
        )
        assert caught.value.problems[1].startswith("loss_fn_state/count: each device")

    @pytest.mark.parametrize(
        "change",
        [
            lambda count, mean: jax.lax.cond(mean > 0, lambda: count + 1, lambda: count + 2),
            lambda count, mean: jax.lax.while_loop(
                lambda n: n < jnp.where(mean > 0, 1, 2), lambda n: n + 1, count
            ),
        ],
        ids=["branch", "loop"],
    )
    def test_states_that_differ_by_what_a_branch_or_a_loop_depends_on_are_refused(self, change):
        """JAX takes the result of either for the same on all devices."""

        def change_count(seen, state, mean):
            return seen, {"count": change(state["count"], mean)}

        with pytest.raises(ShardingError, match="a state differs between the devices") as caught:
            self.step(change_count, manual_axes="data")
        (problem,) = caught.value.problems
        assert problem.startswith("loss_fn_state/count: each device")

    @pytest.mark.parametrize("parts", [1, 2])
    def test_states_that_the_loss_makes_one_equal_those_of_the_automatic_step(self, parts):
        def change(reduce, seen, state, mean):
            return 0.9 * seen + 0.1 * reduce(mean), {"count": state["count"] + 1}

        by_hand = functools.partial(change, lambda mean: jax.lax.pmean(mean, "data"))
        automatic = functools.partial(change, lambda mean: mean)
        found = self.step(by_hand, manual_axes="data", accumulate_steps=parts)
        expected = self.step(automatic, accumulate_steps=parts)
        np.testing.assert_allclose(found.state_vars["seen"], expected.state_vars["seen"], rtol=1e-5)
        assert int(found.loss_fn_state["count"]) == parts

    def test_states_with_the_batch_axis_are_split_as_the_batch_is(self):
        def carrying(model, rng, state, x, y):
            return jnp.mean(model["w"] ** 2), {"last": x}, {}

        given = batch()
        state, _ = on_mesh(
            {"w": jnp.ones(2)}, optimizer_def=optax.sgd(1e-2),
            loss_fn_state={"last": 0.0 * given["x"]},
        )  # fmt: skip
        step = build_train_step_fn(carrying, manual_axes="data")
        state, _ = step(state, **shard_batch(given, MESH, {"batch": "data"}))
        np.testing.assert_array_equal(
            state.loss_fn_state["last"].unwrap("batch", "features"),
            given["x"].unwrap("batch", "features"),
        )


class TestLoopsThatJaxDoesNotTrack:
    """A loop that starts with the same on all devices, and turns it into something that differs."""

    def step(self, carry_on, **aux):
        def looping(model, rng, state, x, y):
            values = x.unwrap("batch", "features")
            total, _ = jax.lax.scan(lambda c, v: (c + jnp.mean(v), None), 0.0, values)
            loss = jnp.mean(model["w"] ** 2) * total / len(values)
            return loss, carry_on(state), {"loss": loss}

        state, _ = on_mesh(
            {"w": jnp.arange(4.0)}, optimizer_def=optax.sgd(1e-1), loss_fn_state=jnp.zeros(())
        )
        placed = shard_batch(batch(), MESH, {"batch": "data"})
        by_hand = build_train_step_fn(looping, manual_axes="data")(state, **placed)
        return by_hand, build_train_step_fn(looping)(state, **placed)

    def test_it_runs_and_equals_the_automatic_step(self):
        (found, aux), (expected, expected_aux) = self.step(lambda state: state)
        np.testing.assert_allclose(aux["loss"], expected_aux["loss"], rtol=1e-5)
        np.testing.assert_allclose(found.params["w"], expected.params["w"], rtol=1e-5)

    def test_a_state_that_changes_is_refused_as_nobody_knows_that_it_agrees(self):
        with pytest.raises(ShardingError, match="a state differs between the devices"):
            self.step(lambda state: state + 1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (3, r"manual_axes must be a name or a sequence of names, not 3\. Write for instance"),
            ((), "must name one mesh axis or several different ones, not ()"),
            (("data", "data"), "must name one mesh axis or several different ones"),
        ],
    )
    def test_what_cannot_be_read(self, given, message):
        with pytest.raises(RuleTypeError, match=message):
            build_train_step_fn(linear_loss, manual_axes=given)

    def call(self, state, manual_axes="data", loss=linear_loss, inputs=None, **options):
        step = build_train_step_fn(loss, manual_axes=manual_axes, **options)
        return step(state, **(batch() if inputs is None else inputs))

    def test_a_mesh_axis_that_the_mesh_does_not_have(self):
        state, _ = on_mesh({"w": jnp.ones(8)})
        with pytest.raises(MeshError, match=r"no mesh axis 'dta'\. Did you mean 'data'\?"):
            self.call(state, "dta")

    def test_a_state_that_is_on_no_mesh(self):
        state = TrainState.initial_state({"w": jnp.ones(8)}, optimizer(), jax.random.key(0))
        with pytest.raises(
            ShardingError, match=r"needs a train state on a mesh.*Place the model on a mesh"
        ) as caught:
            self.call(state)
        assert "jax.device_put(state, train_state_sharding(state, mesh, rules))" in str(
            caught.value
        )

    def test_a_batch_that_does_not_divide(self):
        state, _ = on_mesh({"w": jnp.ones(8)})
        with pytest.raises(ShardingError, match="cannot be split over the devices") as caught:
            self.call(state, inputs=batch(18))
        assert caught.value.problems == tuple(
            f"input {name}: logical axis 'batch' (18) does not divide over mesh axis 'data' (4). "
            "Pad the batch to 20, or leave 2 examples out."
            for name in "xy"
        )
        with pytest.raises(ShardingError, match=r"into 3 microbatches on each device\. Pad the b"):
            self.call(state, accumulate_steps=3)

    def test_inputs_without_the_batch_axis(self):
        state, _ = on_mesh({"w": jnp.ones(8)})
        inputs = {"x": jnp.ones((16, 8)), "y": pz.nx.ones({"rows": 16})}
        with pytest.raises(ShardingError, match="no input has the logical axis 'batch'") as caught:
            self.call(state, inputs=inputs)
        assert caught.value.problems == (
            "x: an array without names.",
            "y: its logical axes are ('rows',).",
        )

    def test_a_region_that_is_manual_already(self):
        state, shardings = on_mesh({"w": jnp.ones(8)})
        step = build_train_step_fn(linear_loss, manual_axes="data", train_state_shardings=shardings)
        mapped = jax.shard_map(
            lambda value: value * step(state, **batch())[1]["loss"],
            mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(),
        )  # fmt: skip
        with pytest.raises(ShardingError, match=r"inside jax\.shard_map, which has taken over"):
            jax.jit(mapped)(jnp.ones(()))

    def test_errors_of_the_loss_function_are_its_own(self):
        def failing(model, rng, state, x, y):
            raise ZeroDivisionError("of the loss")

        state, _ = on_mesh({"w": jnp.ones(8)})
        with pytest.raises(ZeroDivisionError, match="of the loss"):
            self.call(state, loss=failing)


def test_the_text_of_the_documentation_runs(capsys):
    """Both steps that it shows give the same losses."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "per_device.md").read_text("utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    exec(compile(code, "docs/per_device.md", "exec"), {"__name__": "per_device"})
    losses = np.asarray(
        [line.split()[1:3] for line in capsys.readouterr().out.splitlines()], np.float32
    )
    assert len(losses) == 3
    assert losses[-1, 0] < losses[0, 0]
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-5)


def test_a_numbered_batch_axis_is_refused_with_what_to_write_and_that_works():
    mesh = make_mesh({"data": 8})

    def loss_fn(model, rng, state, x):
        x = without_names(x)
        return jnp.mean((x @ model["w"].data_array) ** 2), state, {"rows": x.shape[0]}

    with pytest.raises(RuleTypeError, match=r"number of a dimension\. Name the inputs, name_axes"):
        build_train_step_fn(loss_fn, manual_axes=("data",), batch_axis=0)
    step = build_train_step_fn(loss_fn, manual_axes=("data",), aux_reduction="sum")
    weights = place({"w": pz.nx.wrap(np.ones((4, 2), np.float32), "in", "out")}, mesh, {})
    state = TrainState.initial_state(weights, optax.sgd(0.1), jax.random.key(0))
    batch = name_axes({"x": np.ones((16, 4), np.float32)}, {"x": ("batch", None)})
    state, aux = step(state, **shard_batch(batch, mesh, {"batch": "data"}))
    assert int(aux["rows"]) == 16
