"""What compiled steps move, against what the literature says that their layouts move."""

import pytest

from benchmarks.weak_scaling import LAYOUTS, measure

WIDTH, SEQUENCE = 512, 128


@pytest.mark.parametrize("name", ["ZeRO-1", "fully sharded", "two-dimensional"])
def test_a_compiled_step_moves_what_the_literature_says(name):
    row = measure(name, 8, width=WIDTH, blocks=1, seq=SEQUENCE)
    for compiled, expected in (row["as run"], row["as meant"]):
        assert compiled == pytest.approx(expected, rel=0.05)
    assert row["as run"][0] > 1.3 * row["as meant"][0]


def test_every_layout_has_a_mesh_for_every_number_of_devices():
    for _, shape_for in LAYOUTS.values():
        for devices in (8, 64, 512, 4096):
            shape = shape_for(devices)
            size = 1
            for length in shape.values():
                size *= length
            assert size == devices
