"""Programs that lose a sharding: operation and layer are named, and the fix brings it back."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from penzai import pz

from penzai_shard import ConstrainShardingByName, WhyReport, why
from tests.inspection.sharding_causes.laid_out_programs import (
    MESH,
    OfData,
    P,
    laid_out,
    linear,
    planned,
    struct,
    train_step,
    x,
)

SOURCE = pathlib.Path(__file__).read_text().splitlines()


def behind(function, *more):
    """A layer, something that a user does with what it gives, and more."""
    return pz.nn.Sequential([linear("up"), OfData(function), pz.nn.Elementwise(jnp.sin), *more])


def reshaped(y):
    return y.reshape(3, 4, 8).transpose(1, 0, 2).reshape(12, 8)


def joined(y):
    return jnp.concatenate([y[i] for i in range(12)]).reshape(12, 8)


def batch():
    return x(P("data"), batch=12, a=8)


def losses_of(report: WhyReport, label: str, kind: str = "output"):
    rows = [row for row in report.rows if (row.label, row.kind) == (label, kind)]
    assert rows, [row.what for row in report.rows]
    return [loss for row in rows for loss in row.losses]


def axes_of(report: WhyReport, label: str) -> set[str]:
    rows = [row for row in report.rows if (row.label, row.kind) == (label, "output")]
    assert rows
    return {axis for row in rows for axes in row.spec for axis in axes}


@pytest.mark.parametrize(
    ("function", "operation"), [(reshaped, "reshape"), (joined, "squeeze")], ids=["cut", "indexed"]
)
def test_operation_and_layer_are_named_and_the_fix_mends_what_is_behind(function, operation):
    report = why(behind(function), batch())
    assert axes_of(report, "up") == {"data"}
    assert axes_of(report, "up/elementwise") == set()
    (loss, *others) = losses_of(report, "up/elementwise")
    assert (loss.operation, loss.layer, loss.mesh_axis) == (operation, "up/of_data", "data")
    assert loss.logical_axis == "batch"
    file, _, line = loss.line.rpartition(":")
    assert __file__.endswith(file)
    assert SOURCE[int(line) - 1].strip().startswith("return ")
    assert {other.layer for other in others} <= {"up/of_data"}
    mended = behind(function, ConstrainShardingByName(MESH, {"batch": "data"}))
    assert axes_of(why(mended, batch()), "up/elementwise") == {"data"}
    if loss.fix:
        assert loss.fix == "Put ConstrainShardingByName(mesh, {'batch': 'data'}) after up/of_data"


def test_constraint_that_pins_another_layout_is_named_with_its_missing_rule():
    def model(rules):
        return pz.nn.Sequential([linear("up"), ConstrainShardingByName(MESH, rules)])

    (loss,) = losses_of(why(model({"batch": None}), x(P("data"))), "up/constrain_sharding_by_name")
    assert (loss.operation, loss.layer) == ("a constraint", "up/constrain_sharding_by_name")
    assert loss.line == ""  # It is written in this library.
    assert loss.fix == "Give up/constrain_sharding_by_name the rule 'batch': 'data'"
    assert losses_of(why(model({"batch": "data"}), x(P("data"))), "up") == []


def test_two_that_want_the_same_mesh_axis_are_both_named():
    def step(x, y):
        return x * y

    on_data = struct(8, 8, spec=P("data"))
    report = why(step, on_data, struct(8, 8, spec=P(None, "data")))
    (row,) = report.rows
    assert (row.label, row.spec) == ("result", (("data",), ()))
    (loss,) = row.losses
    assert loss.operation == "mul"
    assert "'data' already splits another dimension there (from the input x" in loss.reason
    report = why(step, on_data, struct(8, 8, spec=P("model")))
    (row,) = report.rows
    assert row.is_whole
    assert {loss.mesh_axis for loss in row.losses} == {"data", "model"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[:6], "split evenly, and dimension 0 of length 6 does not divide"),
        (lambda x: x.reshape(2, 4, 8), "split over whole mesh axes alone"),
        (jax.jit(lambda x: x, out_shardings=laid_out()), "dimension 0 of length 8 is declared"),
    ],
    ids=["uneven", "parts", "declared"],
)
def test_what_is_lost_as_it_comes_out_is_lost_at_the_end_and_at_no_loop(function, reason):
    (row,) = why(function, struct(8, 8, spec=P("data"))).rows
    assert row.is_whole
    assert {loss.operation for loss in row.losses} == {"the end of the step"}
    assert all(reason in loss.reason for loss in row.losses), row.losses


def test_parameter_that_is_gathered_for_use_is_said_where_it_is_and_is_no_loss():
    block = pz.nn.Sequential([linear("up"), pz.nn.Elementwise(jnp.tanh)])
    model = planned(block, {"b": "data"})
    report = why(model, x(P("data")))
    (loss,) = losses_of(report, "up")
    assert loss.gathered == "model/up.weights"
    assert (loss.operation, loss.layer) == ("a matrix product", "up")
    assert losses_of(report, "up/elementwise") == []
    assert not report.lost

    def total(model, x):
        return model(x).untag("batch").sum()

    (result,) = why(jax.jit(total), pz.freeze_params(model), x(P("data"))).of_kind("result")
    assert result.is_whole
    assert not result.losses
    assert "is gathered over 'data' at a matrix product in layer up" in str(loss)


def test_arrays_that_are_whole_say_why():
    step, args, kwargs = train_step(linear("up"), {}, split=P("data"))
    report = why(step, *args, **kwargs)
    (gradient,) = report.of_kind("gradient")
    assert gradient.is_whole
    assert "as which the train step lays out its gradient" in gradient.whole_because
    (total,) = why(lambda x: x.sum(0), struct(8, 8, spec=P("data"))).rows
    assert (
        total.whole_because == "devices sum up what they have over 'data' at a sum over dimensions"
    )
    (alone,) = why(lambda x: x + 1, struct(8, 8, spec=P())).rows
    assert alone.whole_because == "nothing that it is made of is split"
    assert not alone.losses


def test_operation_that_needs_a_dimension_whole_and_splits_it_again_is_named_on_the_way():
    report = why(behind(lambda y: jnp.sort(y, axis=0)), batch())
    (row,) = [row for row in report.rows if row.label == "up/elementwise"]
    ((cause,),) = [row.causes]
    assert [str(step) for step in cause.way] == [
        "a matrix product in up",
        "sort (which needs it whole, and splits it again) in up/of_data",
        "sin in up/elementwise",
    ]


def test_a_part_of_a_mesh_axis_is_explained_where_it_is_named():
    report = why(jax.jit(lambda x: x.reshape(2, 4, 6)), struct(8, 6, spec=P("data")))
    (row,) = report.rows
    assert {loss.mesh_axis for loss in row.losses} == {"data:(1)2", "data:(2)2"}
    assert report.notes == (
        "'data:(1)2' is a part of mesh axis 'data': 2 groups of its devices.",
        "'data:(2)2' is a part of mesh axis 'data': 2 groups of its devices in each of 2.",
    )
    assert why(jax.jit(jnp.sin), struct(8, 6, spec=P("data"))).notes == ()
