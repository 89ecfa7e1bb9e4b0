"""The benchmark of checkpoints' memory, at a size that takes no time."""

import jax
import numpy as np
import pytest

import penzai_shard as pzs
from benchmarks.checkpoint_memory import LAYOUTS, filled, landed, peak_above, prepare, restorers


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("checkpoint_memory"))
    prepare(path, 1)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ways_of_restoring_give_the_same_on_the_same_devices(prepared, layout):
    mesh = pzs.make_mesh({"data": 8})
    ways = restorers(prepared, mesh, LAYOUTS[layout], 1)
    wanted = filled(1, mesh, LAYOUTS[layout])
    for name in ("ours", "ours, unverified", "orbax", "ours, transposed"):
        restored = ways[name]()
        assert landed(restored) == landed(wanted)
        for key, array in wanted.items():
            found = restored[key].order_as("row", "column")
            np.testing.assert_array_equal(found.data_array, array.data_array)
            if name != "ours, transposed":
                assert restored[key].data_array.sharding == array.data_array.sharding
    assert jax.tree.leaves(ways["ours, cast"]())[0].dtype == "bfloat16"


def test_the_peak_is_that_of_the_work():
    _, above, peak = peak_above(lambda: np.ones(2**23))
    # Linux counts the pages of a process to within some.
    assert 0.9 * 2**26 < above < 2**27
    assert peak > above
