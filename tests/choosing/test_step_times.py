"""The time of a step, from what it costs and the figures of the hardware."""

import pytest

from penzai_shard.choosing.step_costs import Sent, StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.inspection.devices.hardware import Hardware


def cost(flops, optimizer=0.0, **sent):
    return StepCost(
        flops,
        tuple(
            Sent("parameter", "", (), tuple(axes.split("_")) if axes != "unknown" else (), bytes_)
            for axes, bytes_ in sent.items()
        ),
        {"optimizer": optimizer},
    )


def test_a_step_takes_the_larger_of_what_is_computed_and_sent():
    hardware, mesh = Hardware.read("v5e:4x8"), {"data": 8, "model": 4}
    time = StepTime.of(cost(1.97e14 / 2, data=50e9, model=100e9), mesh, hardware)
    assert time.compute == pytest.approx(0.5)
    assert time.by_mesh_axis == pytest.approx({"data": 1.0, "model": 2.0})
    assert time.traffic == pytest.approx(2.0)
    assert time.bound == time.traffic
    assert time.without_overlap == pytest.approx(2.5)
    assert StepTime.of(cost(1.97e15), mesh, hardware).bound == pytest.approx(10.0)


def test_what_goes_over_several_mesh_axes_uses_the_links_of_all():
    hardware, mesh = Hardware.read("v5e:4x8"), {"data": 8, "model": 4}
    time = StepTime.of(cost(0.0, data_model=100e9), mesh, hardware)
    assert time.traffic == pytest.approx(1.0)
    assert time.by_mesh_axis == pytest.approx({"data": 1.0, "model": 1.0})
    both = StepTime.of(cost(0.0, data=50e9, model=50e9, data_model=100e9), mesh, hardware)
    assert both.traffic == pytest.approx(2.0)
    assert StepTime.of(cost(0.0, unknown=100e9), mesh, hardware) == time


def test_no_mesh_axis_is_busy_for_longer_than_all_that_is_sent_takes():
    hardware, mesh = Hardware.read("v5e:4x8"), {"data": 8, "model": 4}
    time = StepTime.of(cost(0.0, data=50e9, data_model=100e9), mesh, hardware)
    assert time.traffic == pytest.approx(1.5)
    assert time.by_mesh_axis == pytest.approx({"data": 1.5, "model": 1.0})


def test_mesh_axes_that_share_links_take_their_time_one_after_the_other():
    hardware = Hardware.read("h100:8")
    time = StepTime.of(cost(0.0, data=450e9, model=450e9), {"data": 2, "model": 4}, hardware)
    assert time.by_mesh_axis == pytest.approx({"data": 1.0, "model": 1.0})
    assert time.traffic == pytest.approx(2.0)


def test_over_a_mesh_axis_of_one_device_nothing_is_sent():
    hardware = Hardware.read("h100:8")
    time = StepTime.of(cost(0.0, model=450e9), {"data": 8, "model": 1}, hardware)
    assert (time.traffic, time.by_mesh_axis) == (0.0, {"data": 0.0, "model": 0.0})


def test_an_update_takes_as_long_as_reading_and_writing_the_optimizers_state():
    hardware, mesh = Hardware.read("v5e:8"), {"data": 8}
    time = StepTime.of(cost(1.97e14, optimizer=819e9), mesh, hardware)
    assert (time.update, time.bound, time.without_overlap) == pytest.approx((2.0, 2.0, 3.0))
    unknown = Hardware("own", hardware.flops, None, hardware.network)
    assert StepTime.of(cost(1.97e14, optimizer=819e9), mesh, unknown).update == 0.0


def test_simulated_devices_do_one_thing_after_the_other():
    hardware, mesh = Hardware.read("cpu:8"), {"data": 8}
    parts = cost(hardware.flops, hardware.memory_bandwidth, data=hardware.bandwidth(mesh)["data"])
    time = StepTime.of(parts, mesh, hardware)
    assert (time.compute, time.traffic, time.update) == pytest.approx((1.0, 1.0, 2.0))
    assert time.bound == pytest.approx(4.0)
