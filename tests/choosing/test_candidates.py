"""The sane layouts of a step, what is left out, and what they store."""

import math

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.candidates import (
    make_candidates,
    mesh_shapes,
    read_tables,
    stored_bytes,
)
from penzai_shard.choosing.hardware import Hardware
from penzai_shard.layouts.axis_roles import mesh_axes_of
from tests.choosing.models import mlp_weights, read_llama, read_weights
from tests.refusals import problem_paths, problems_of

GRID = {"data": 4, "model": 2}
MLP = mlp_weights(128, 512)


def read_total(weights, optimizer=None):
    """A step of named weights, which has no layers."""
    x = jax.ShapeDtypeStruct((8, 4), "float32")
    return read_weights(
        lambda w, x: sum(own.sum() for own in w.values()) + x.sum(), weights, x, optimizer
    )


@pytest.fixture(scope="module")
def workload():
    return read_llama(multiplier=2)


@pytest.fixture(scope="module")
def on_hosts(workload):
    return make_candidates(workload, mesh_shapes(Hardware.read("h100:2x4")), microbatches=(1, 4))


def layouts_on(found, **mesh_sizes):
    return [
        each.layout
        for each in found
        if dict(each.mesh_sizes) == mesh_sizes and each.microbatches == 1
    ]


def axes_over(found, axis):
    """The mesh axes that activations are split over by a logical axis."""
    return {mesh_axes_of(axis, [each.layout.compute]) for each in found}


def held_bytes(tree):
    """What a device holds of arrays."""
    arrays = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


# What there is


@pytest.mark.parametrize(
    ("is_large", "mesh_sizes", "preset", "options"),
    [
        (False, {"data": 8}, pzs.Layout.data_parallel, {}),
        (False, GRID, pzs.Layout.tensor_parallel, {"vocabulary": "model"}),
        (False, GRID, pzs.Layout.sequence_parallel, {"vocabulary": None}),
        # Arrays of the transformer are too small to be split by their largest dimension.
        (True, {"data": 8}, pzs.Layout.zero1, {"blocks": (), "vocabulary": None}),
        (True, {"data": 8}, pzs.Layout.fully_sharded, {"blocks": (), "vocabulary": None}),
        (True, {"replica": 2, "data": 4}, pzs.Layout.hybrid, {"blocks": (), "vocabulary": None}),
    ],
)
def test_make_candidates_has_the_presets(workload, is_large, mesh_sizes, preset, options):
    found = make_candidates(read_total(MLP) if is_large else workload, [mesh_sizes])
    assert preset(**options) in layouts_on(found, **mesh_sizes)


def test_make_candidates_of_a_small_model_counted_by_hand():
    """Neurons over ``model``; stored as used, by the embedding, or by the largest dimension."""
    found = make_candidates(read_total(MLP), [GRID], microbatches=(1,))
    specs = [
        (
            each.layout.parameters.spec(("embedding", "neurons"), (128, 512), each.mesh),
            each.layout.optimizer,
        )
        for each in found
    ]
    # By the embedding and by the largest free dimension are the same here.
    assert [spec for spec, _ in specs] == [P(None, "model"), P(None, "model"), P("data", "model")]
    assert [optimizer is None for _, optimizer in specs] == [True, False, True]
    # Layouts do not know layers of a dictionary.
    assert {(each.layout.blocks, each.layout.rematerialise) for each in found} == {((), None)}


def test_make_candidates_has_each_once_and_in_one_order(workload, on_hosts):
    meshes = mesh_shapes(Hardware.read("h100:2x4"))
    again = make_candidates(read_llama(multiplier=2), meshes, microbatches=(1, 4))
    assert len({each.words for each in on_hosts}) == len(on_hosts)
    assert [each.words for each in again] == [each.words for each in on_hosts]


def test_make_candidates_tries_all_policies_of_each_table(on_hosts):
    ways = [(x.rematerialise, x.reshard_after_forward) for x in layouts_on(on_hosts, data=8)]
    kept = [(None, False), ("dots", False), ("nothing", False)]
    # Stored as used; or split by the embedding, so that parameters can be gathered again, with the
    # optimizer's state alike or as parameters are used.
    assert ways == [*kept, *kept, (None, True), *kept, (None, True)]


def test_make_candidates_uses_each_mesh_axis_and_gives_each_device_examples(on_hosts):
    for each in on_hosts:
        sizes, layout = dict(each.mesh_sizes), each.layout
        used = {axis for rule in layout.compute.rules for axis in rule.mesh_axes}
        assert used == {*sizes}
        parts = math.prod(sizes[axis] for axis in mesh_axes_of("batch", [layout.compute]))
        assert 16 % (parts * each.microbatches) == 0


def test_make_candidates_has_steps_that_can_be_built(workload, on_hosts):
    for each in on_hosts[:: len(on_hosts) // 2]:
        _, state, inputs = workload.build(each)
        assert held_bytes(state.params) == stored_bytes(workload, each, ["parameters"])
        (over,), (tokens,) = axes_over([each], "batch"), jax.tree.leaves(inputs)
        parts = math.prod(dict(each.mesh_sizes)[axis] for axis in over)
        assert tokens.sharding.shard_shape(tokens.shape) == (16 // parts, 32)


def test_make_candidates_of_a_wide_model_on_many_devices():
    """Llama 3 70B, of which one block says as much as 80."""
    sizes = {"embedding": 8192, "projection": 128, "neurons": 28_672, "vocabulary": 128_256}
    workload = read_llama(256, 2048, optax.adamw(1e-3), heads=8, multiplier=8, **sizes)
    found = make_candidates(workload, mesh_shapes(Hardware.read("v5e:256")))
    assert (len(found), len({each.table for each in found})) == (4086, 341)


# What is left out


def test_make_candidates_counts_what_does_not_divide():
    workload = read_llama(heads=3)
    found = make_candidates(workload, [GRID])
    assert found
    assert axes_over(found, "heads") == {()}
    ((reason, count),) = found.left_out.items()
    assert "'heads' (3)" in reason
    # Heads with or without neurons and vocabulary, by 5 ways to store parameters and optimizer.
    assert count == 4 * 5


@pytest.mark.parametrize(
    ("batch", "options"),
    # The other mesh does not divide the batch, or lacks a mesh axis that is kept.
    [(4, {"microbatches": (1, 2)}), (16, {"keep": {"neurons": "model"}})],
)
def test_make_candidates_counts_meshes_that_are_left_out(batch, options):
    found = make_candidates(read_llama(batch, multiplier=2), [{"data": 8}, GRID], **options)
    assert {each.mesh_sizes for each in found} == {(("data", 4), ("model", 2))}
    assert sum(found.left_out.values()) == 1


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        ({"neurons": None}, "mesh axis 'model' has no use"),
        ({"embedding": "model"}, "mesh axis 'model' is wanted by both 'neurons' and 'embedding'"),
        ({"seq": "model"}, "the sequence is not split over ('model',), as is kept"),
    ],
)
def test_make_candidates_says_why_there_are_none(keep, reason):
    workload = read_total({"up": MLP["up"]})
    found = make_candidates(workload, [GRID], keep=keep)
    assert (len(found), [*found.left_out]) == (0, [reason])


# What is kept


def stored_axes(workload, each, axis):
    """The mesh axes of a logical axis in all parameters that have it."""
    rules = read_tables(workload, each)["parameters"]
    found = set()
    for leaf in leaves_of(workload.model):
        spec = (*rules.spec(leaf.names or (), leaf.shape, each.mesh), *(None,) * len(leaf.shape))
        found |= {own for name, own in zip(leaf.names or (), spec, strict=False) if name == axis}
    return found


def specs_of(workload, each):
    """All that a candidate is, with specs in place of tables of rules."""
    shapes = {(leaf.names, leaf.shape) for leaf in leaves_of(workload.model)}
    tables = read_tables(workload, each)
    specs = {(key, *x): rules.spec(*x, each.mesh) for key, rules in tables.items() for x in shapes}
    return each.mesh_sizes, each.layout.between_blocks, specs


@pytest.mark.parametrize(
    ("keep", "axis", "over"),
    [
        ({"neurons": "model"}, "neurons", {"model"}),
        ({"neurons": None}, "neurons", {None}),
        ({"head_groups": "model"}, "head_groups", {"model"}),
        ({"embedding": "data"}, "embedding", {"data"}),
        ({"embedding": None}, "embedding", {None}),
    ],
)
def test_make_candidates_keeps_what_is_decided_of_parameters(workload, keep, axis, over):
    options = {"meshes": [GRID], "rematerialise": [None], "microbatches": [1]}
    free = make_candidates(workload, **options)
    found = make_candidates(workload, keep=keep, **options)
    assert all(stored_axes(workload, each, axis) == over for each in found)
    # All that is free stays so.
    kept = [specs_of(workload, x) for x in free if stored_axes(workload, x, axis) == over]
    assert [specs_of(workload, each) for each in found] == kept != []


@pytest.mark.parametrize(("over", "has_sequence"), [("model", True), (None, False)])
def test_make_candidates_keeps_what_is_decided_of_the_sequence(workload, over, has_sequence):
    found = make_candidates(workload, [GRID], keep={"seq": over})
    assert {each.layout.between_blocks is not None for each in found} == {has_sequence}


@pytest.mark.parametrize(
    ("mesh_sizes", "keep", "over"),
    [
        (GRID, {"batch": ("data", "model")}, {("data", "model")}),
        # Mesh axes of other names are tried for batch and model.
        ({"x": 4, "y": 2}, {}, {("x", "y"), ("x",), ("y",), ()}),
        ({"x": 4, "y": 2}, {"batch": "y"}, {("y",)}),
        # What is for the neurons is not for the batch.
        ({"x": 4, "y": 2}, {"neurons": "y"}, {("x",), ()}),
    ],
)
def test_make_candidates_splits_the_batch_over(workload, mesh_sizes, keep, over):
    assert axes_over(make_candidates(workload, [mesh_sizes], keep=keep), "batch") == over


@pytest.mark.parametrize("axis", ["embedding", "embed"])
def test_make_candidates_keeps_an_axis_of_another_name_whole(axis):
    workload = read_total({"up": {"embed": 512, "mlp": 128}})
    found = make_candidates(workload, [{"data": 8}], keep={axis: None})
    assert {P(), P(None, "data")} == {
        read_tables(workload, each)["parameters"].spec(("embed", "mlp"), (512, 128), each.mesh)
        for each in found
    }


@pytest.mark.parametrize("axis", ["embedding", "batch"])
def test_make_candidates_keeps_mesh_axes_in_the_order_of_the_mesh(axis):
    workload, meshes = read_total(MLP), mesh_shapes(Hardware.read("h100:2x4"))
    one, other = (
        [each.words for each in make_candidates(workload, meshes, keep={axis: over})]
        for over in (("data", "replica"), ("replica", "data"))
    )
    assert one == other != []


def test_make_candidates_uses_all_mesh_axes_where_the_batch_keeps_one():
    workload = read_total({"up": MLP["up"]})
    meshes = [{"data": 8}, {"replica": 2, "data": 4}]
    found = make_candidates(workload, meshes, keep={"batch": "replica"})
    assert axes_over(found, "neurons") == {("data",)}


@pytest.mark.parametrize(
    ("keep", "path", "fix"),
    [
        ({"neuron": "model"}, "keep['neuron']", "'neurons'"),
        ({"batch": "modell"}, "keep['batch']", "'model'"),
        ({"experts": "model"}, "keep['experts']", "vocabulary"),
        ({"batch": "data", "neurons": "data"}, "compute", "different"),
        ({"heads": "model", "query_heads": None}, "keep['query_heads']", "Leave one out"),
    ],
)
def test_make_candidates_refuses_to_keep_what_there_is_not(workload, keep, path, fix):
    (found,) = problems_of(pzs.RuleTypeError, make_candidates, workload, [GRID], keep=keep)
    assert (found.path, fix in found.fix) == (path, True)


# Other models


@pytest.mark.parametrize(
    "weights",
    [
        {"up": {"embed": 64, "mlp": 512}, "out": {"embed": 64, "vocab": 1024}},
        {"up": {"in": 64, "wide": 512}, "down": {"wide": 512, "in": 64}},
        {"up": {"embedding": 64, "heads*projection": 512}},
    ],
)
def test_make_candidates_splits_models_with_other_names(weights):
    workload = read_total(weights)
    found = make_candidates(workload, [GRID])
    wide = tuple(weights["up"]), tuple(weights["up"].values())
    specs = {read_tables(workload, each)["parameters"].spec(*wide, each.mesh) for each in found}
    assert {P(None, "model"), P("data", "model")} <= specs


def test_make_candidates_refuses_policies_of_blocks_that_there_are_not():
    workload = read_total({"up": MLP["up"]})
    call = make_candidates, workload, [GRID]
    assert problem_paths(pzs.RuleTypeError, *call, rematerialise=["dots"]) == ["rematerialise"]


# Meshes


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("cpu:6", [{"data": 6}, {"data": 3, "model": 2}, {"data": 2, "model": 3}, {"model": 6}]),
        ("cpu:1", [{"data": 1}]),
        ("v6e:16x16", [{"data": 256}, {"data": 16, "model": 16}, {"model": 256}]),
        (
            "h100:2x2",
            [{"data": 4}, {"replica": 2, "data": 2}, {"data": 2, "model": 2}, {"model": 4}],
        ),
    ],
)
def test_mesh_shapes(name, shapes):
    assert mesh_shapes(Hardware.read(name)) == shapes


# What is stored


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-3), optax.adafactor(1e-3), optax.sgd(0.1)])
def test_stored_bytes_are_those_of_the_plan(optimizer):
    workload = read_total({**mlp_weights(256, 512), "norm": {"embedding": 256}}, optimizer)
    found = make_candidates(workload, [GRID], microbatches=(1,))
    assert len(found) == 5
    for each in found:
        _, state, _ = workload.build(each)
        params, moments = held_bytes(state.params), held_bytes(state.opt_state)
        assert stored_bytes(workload, each, ["parameters"]) == params
        assert stored_bytes(workload, each, ["optimizer"]) == moments
        assert stored_bytes(workload, each) == params + moments
