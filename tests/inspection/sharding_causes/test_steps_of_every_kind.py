"""``why`` of steps as people write them: each has its rows, all with causes, and nothing is run."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from penzai import pz

from penzai_shard import (
    TrainState,
    abstract_model,
    build_train_step_fn,
    data_parallel,
    fully_sharded,
    place,
    shard_batch,
    tensor_parallel,
    why,
)
from penzai_shard.cli import demo
from penzai_shard.inspection.steps import programs
from tests.inspection.sharding_causes.laid_out_programs import (
    MESH,
    OfData,
    P,
    laid_out_state,
    linear,
    named,
    planned,
    stacked,
    train_step,
    x,
)

DEMO_LAYOUTS = {
    "replicated": {"batch": "data"},
    "fully sharded": data_parallel() | fully_sharded(min_size=1024),
    "two dimensions": data_parallel() | tensor_parallel() | fully_sharded(min_size=1024),
}


def causes_of(report: Any, label: str, kind: str) -> dict[str, set[tuple[str, str]]]:
    rows = [row for row in report.rows if (row.label, row.kind) == (label, kind)]
    assert rows, [row.what for row in report.rows]
    found: dict[str, set[tuple[str, str]]] = {}
    for cause in (cause for row in rows for cause in row.causes):
        found.setdefault(cause.mesh_axis, set()).add((cause.kind, cause.path))
    return found


@pytest.mark.parametrize("rules", DEMO_LAYOUTS.values(), ids=DEMO_LAYOUTS)
def test_no_row_of_the_demo_is_without_a_cause(rules: Any) -> None:
    model, _ = demo.with_constraints(planned(abstract_model(demo.build_model, 0), rules), MESH)
    state = TrainState.initial_state(model, optax.sgd(1e-3), jax.random.key(0))
    step = build_train_step_fn(demo.next_byte_loss)
    report = why(
        step, laid_out_state(state, rules), tokens=named(P("data"), "int32", batch=8, seq=17)
    )
    assert len(report.of_kind("output")) > 50
    assert len(report.of_kind("gradient")) == 21
    assert report.unexplained == ()
    for row in report.rows:
        assert [cause.mesh_axis for cause in row.causes] == [a for axes in row.spec for a in axes]
        assert row.causes or row.losses or row.whole_because


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_nothing_is_run_on_meshes_with_devices(kind, monkeypatch, capfd) -> None:
    monkeypatch.setattr(programs, "compile_bytecode", None)
    ran = []

    @pz.pytree_dataclass
    class Speaking(pz.nn.Layer):
        def __call__(self, value, /, **_):
            jax.debug.print("ran with {}", value.data_array.sum())
            jax.debug.callback(ran.append, value.data_array)
            return value

    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    up = pz.nn.Linear.from_config("up", jax.random.key(0), {"a": 8}, {"b": 8})
    model = place(pz.nn.Sequential([up, Speaking()]), mesh, {"b": "model"})
    report = why(model, shard_batch(pz.nx.ones({"batch": 8, "a": 8}), mesh, {"batch": "data"}))
    jax.effects_barrier()
    assert causes_of(report, "up", "output") == {
        "data": {("input", "argument")},
        "model": {("parameter", "model/up.weights")},
    }
    assert not ran
    assert "ran with" not in "".join(capfd.readouterr())


def test_gradients_in_functions_of_users_are_found_where_they_are_certain() -> None:
    down = linear("down", {"b": "model"}, inputs={"b": 8}, outputs={"c": 8})
    model = pz.freeze_variables(pz.nn.Sequential([linear("up", {"b": "model"}), down]))

    def loss(model, x):
        return jnp.mean(model(x).unwrap("batch", "c") ** 2)

    def step(model, x):
        gradients = jax.grad(loss)(model, x)
        return jax.tree.map(lambda p, g: p - g, model, gradients)

    report = why(jax.jit(step), model, x(P("data")))
    assert causes_of(report, "model/up.weights", "gradient") == {
        "model": {("parameter", "model/up.weights")}
    }
    # What goes back to the layer before has the shape of these weights too.
    assert causes_of(report, "model/down.weights", "gradient")
    assert {row.label for row in report.of_kind("result")} == {
        "result/up.weights",
        "result/down.weights",
    }
    assert report.unexplained == ()


def test_what_a_layer_gives_is_not_what_it_lets_out_by_the_way() -> None:
    let_out = []

    def twice(y):
        let_out.append(y.T + 1)
        return y * 2

    def step(model, x):
        return model(x).data_array.sum() + let_out.pop().sum()

    model = pz.nn.Sequential([linear("up"), OfData(twice)])
    report = why(step, model, x(P("data"), batch=12, a=8))
    assert [row.shape for row in report.rows if row.label == "up/of_data"] == [(12, 8)]


def test_microbatches_scaled_losses_and_loops_have_their_gradients_once() -> None:
    options = {"accumulate_steps": 2, "loss_scaling": 1024.0}
    step, args, kwargs = train_step(
        stacked({}), {"b": "model"}, split=P("data"), gives="a", **options
    )
    report = why(step, *args, **kwargs)
    assert sorted(row.label for row in report.of_kind("gradient")) == ["down.weights", "up.weights"]
    assert causes_of(report, "up", "output") == {
        "data": {("input", "inputs/x")},
        "model": {("parameter", "params/up.weights")},
    }
    assert report.unexplained == ()


def test_tied_parameter_has_one_gradient_and_a_frozen_one_none() -> None:
    tied = linear("tied")
    layers = [tied, pz.nn.RenameAxes("b", "a"), tied, pz.nn.RenameAxes("b", "a"), linear("last")]
    step, args, kwargs = train_step(
        pz.nn.Sequential(layers), {"b": "model"}, trainable=lambda p: "last" not in p.label
    )
    report = why(step, *args, **kwargs)
    assert [row.label for row in report.of_kind("gradient")] == ["tied.weights"]
    assert causes_of(report, "last", "output") == {"model": {("parameter", "params/last.weights")}}
    assert report.unexplained == ()
