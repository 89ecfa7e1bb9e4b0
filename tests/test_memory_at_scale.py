"""1.5 billion parameters, planned: what each of eight devices holds, to the byte."""

import jax
import pytest

from benchmarks.memory_at_scale import DEVICES, PlannedMemory, abstract_state, build_model
from penzai_shard import Layout, abstract_model, make_mesh, make_plan

WIDTH, NEURONS, VOCABULARY, BLOCKS = 2048, 5632, 65536, 24
MATRICES = 2 * WIDTH * VOCABULARY + BLOCKS * WIDTH * (4 * WIDTH + 3 * NEURONS)
NORMS = (2 * BLOCKS + 1) * WIDTH
# The step's number, those of the optimizer, the key, and what norms and attention keep.
SCALARS = 1000


@pytest.fixture(scope="module")
def state():
    layout = Layout.fully_sharded()
    return abstract_state(layout, make_mesh({"data": DEVICES}))


def planned(state, devices):
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    return Layout.fully_sharded().plan(state, mesh)


def test_fully_sharded_training_is_within_two_percent_of_an_even_share(state):
    memory = PlannedMemory.of(planned(state, DEVICES))
    assert memory.parameters == MATRICES + NORMS == 1_501_661_184
    assert memory.ideal == 16 * memory.parameters / 8
    # In a stack the norms of all blocks are one array, which is split; the last one stays whole.
    share = (memory.parameters - WIDTH) // DEVICES + WIDTH
    assert memory.gradients == 4 * share
    assert 0 < memory.held - 12 * share < SCALARS
    assert 0 < memory.whole_bytes - 16 * WIDTH < SCALARS
    assert memory.ideal < memory.resident < 1.0001 * memory.ideal
    assert memory.largest == 4 * WIDTH * VOCABULARY


def test_without_a_stack_the_norm_of_each_block_stays_whole():
    layout, mesh = Layout.fully_sharded(), make_mesh({"data": DEVICES})
    memory = PlannedMemory.of(layout.plan(abstract_state(layout, mesh, stacked=False), mesh))
    share = MATRICES // DEVICES + NORMS
    assert memory.gradients == 4 * share
    assert 0 < memory.held - 12 * share < SCALARS
    assert memory.ideal < memory.resident < 1.0005 * memory.ideal


@pytest.mark.parametrize("devices", [64, 512, 2048])
def test_more_devices_hold_as_much_less(state, devices):
    memory = PlannedMemory.of(planned(state, devices))
    assert memory.resident * devices / (16 * memory.parameters) < 1.02


def test_more_devices_than_any_dimension_has_elements_are_reported(state):
    plan = planned(state, 4096)
    memory = PlannedMemory.of(plan)
    # Embedding and head have a dimension that divides, the blocks have not.
    assert memory.largest < memory.whole_bytes == plan.replicated_bytes
    reasons = {leaf.reason for leaf in plan.leaves if leaf.is_replicated and len(leaf.shape) > 1}
    assert reasons == {"no free dimension divides over mesh axis 'data' (4096)"}


@pytest.mark.parametrize(
    "layout", [Layout.data_parallel(), Layout.fully_sharded(min_size=2**32)], ids=["data", "none"]
)
def test_a_layout_that_copies_holds_everything(layout):
    plan = make_plan(abstract_model(build_model), make_mesh({"data": DEVICES}), layout.parameters)
    assert 0 < plan.bytes_per_device - 4 * (MATRICES + NORMS) < SCALARS
