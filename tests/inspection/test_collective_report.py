"""The report of collectives: its totals, its bound in time, its table."""

import dataclasses
import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy.optimize import linprog

from penzai_shard.errors import MeshError, RuleTypeError, SelectionError
from penzai_shard.inspection.program_view import compile_step
from penzai_shard.inspection.traffic.collective_records import (
    Collective,
    CollectivePart,
    CollectiveTotal,
    ring_bytes,
)
from penzai_shard.inspection.traffic.collective_report import CollectiveReport, collectives
from penzai_shard.inspection.traffic.collective_table import MOST_ROWS
from penzai_shard.meshes import make_mesh

P = PartitionSpec
NUMBERS = itertools.count()

MESH = {"data": 4, "model": 2}


def collective(
    kind="all-gather",
    axes=("data",),
    payload=1024,
    times=1,
    layers=("mlp",),
    phase="forward",
    **others,
):
    size = int(np.prod([MESH[axis] for axis in axes])) if axes else 2
    part = CollectivePart(layers, layers, phase, "", payload)
    record = Collective(
        kind=kind,
        mesh_axes=axes,
        axes_text="+".join(axes) if axes else "groups of 2",
        group_size=size,
        payload_bytes=payload,
        wire_bytes=ring_bytes(kind, payload, size),
        times=times,
        phase=phase,
        layers=layers,
        labels=layers,
        moves=(),
        arrays=(f"f32[{payload // 4}]",),
        name=f"{kind}.{next(NUMBERS)}",
        parts=(part,),
    )
    return dataclasses.replace(record, **others)


def report(*collectives, mesh=MESH):
    return CollectiveReport(tuple(collectives), mesh)


def test_totals_count_every_execution_and_each_collective_once():
    # Ring: all-gather over 4 sends 3/4 of 1024 = 768, all-reduce over 2 sends 2/2 of 512 = 512.
    found = report(
        collective(times=3),
        collective("all-reduce", ("model",), 512, layers=("mlp", "loss"), phase="backward"),
    )
    first, second = CollectiveTotal(1, 3, 3072, 2304), CollectiveTotal(1, 1, 512, 512)
    assert list(found.by_layer().items()) == [("mlp", first), ("mlp + loss", second)]
    assert list(report(*found.collectives[::-1]).by_layer()) == ["mlp", "mlp + loss"]
    assert found.by_kind() == {"all-gather": first, "all-reduce": second}
    assert found.by_mesh_axis() == {"data": first, "model": second}
    assert found.by_phase() == {"forward": first, "backward": second}
    assert found.total == CollectiveTotal(2, 4, 3584, 2816)
    assert found.wire_bytes == 2816


def test_what_runs_an_unknown_number_of_times_is_in_no_sum_and_is_said():
    found = report(collective(), collective(payload=4096, times=None))
    assert found.total == CollectiveTotal(1, 1, 1024, 768, 1, 3072)
    assert found.wire_bytes == 768
    text = str(found)
    assert "1 collective in one step, and 1 that run an unknown number of times" in text
    assert "1 + ?" in text
    assert "768 B + ? x 3.0 KiB" in text


def test_a_layer_is_found_alone_with_others_and_by_what_is_around_it():
    alone = collective(layers=("block_1/mlp/up",))
    merged = collective(layers=("block_1/attention/query", "block_1/attention/key"))
    other = collective(layers=("block_11/mlp/up",))
    found = report(alone, merged, other, collective(layers=()))
    assert found.owned_by("block_1/mlp/up") == (alone,)
    assert found.owned_by("block_1/attention/key") == (merged,)
    assert found.owned_by("block_1") == (alone, merged)
    assert found.owned_by("block_{1,11}/mlp") == (alone, other)
    assert found.owned_by("block_{1}/{mlp, attention}") == ()
    assert found.owned_by("block") == ()
    assert [one.owner for one in found.unattributed] == ["unattributed"]
    known = dataclasses.replace(found, known_owners=frozenset({"block_1/mlp/up", "block_2/norm"}))
    assert known.owned_by("block_2") == ()
    with pytest.raises(SelectionError, match=r"mlp/pu'\. Did you mean 'block_1/mlp/up'"):
        known.owned_by("block_1/mlp/pu")


def test_a_function_of_arrays_that_trains_nothing_gathers_for_those_of_its_trees():
    mesh = make_mesh({"data": 8})
    split = NamedSharding(mesh, P("data"))
    w, x = (jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=split) for _ in range(2))
    replicated = NamedSharding(mesh, P())
    gathering = jax.jit(lambda w: w["mlp"], out_shardings=replicated)
    assert [one.labels for one in collectives(gathering, {"mlp": w}).collectives] == [("w/mlp",)]
    alone = jax.jit(lambda x: x + 0, out_shardings=replicated)
    assert [one.labels for one in collectives(alone, x).collectives] == [()]


def test_owners_that_could_have_collectives_are_known_of_compiled_steps():
    x = jnp.ones((8, 8))
    found = collectives(jax.jit(lambda params, x: params["w"] @ x), {"w": x}, x)
    assert found.owned_by("params/w") == found.owned_by("loss") == ()
    with pytest.raises(SelectionError, match="the step has no layer 'w'"):
        found.owned_by("w")


@pytest.mark.parametrize("seed", range(20))
def test_the_least_time_is_that_of_the_best_division_over_the_links(seed):
    """The judge divides each load freely over its mesh axes, by linear programming."""
    chance = random.Random(seed)
    mesh = {"a": 2, "b": 3, "c": 4, "d": 5}
    bandwidth = {axis: chance.uniform(1, 10) for axis in mesh}
    sets = [s for n in range(1, 5) for s in itertools.combinations(mesh, n)]
    chosen = chance.sample(sets, chance.randint(1, 8))
    loads = [chance.uniform(0, 100) for _ in chosen]
    found = report(
        *(
            collective(axes=None, mesh_axes=s, wire_bytes=b)
            for s, b in zip(chosen, loads, strict=True)
        ),
        mesh=mesh,
    )
    # Variables: the part of each load on each mesh axis, and the time.
    parts = [(i, axis) for i, axes in enumerate(chosen) for axis in axes]
    on_axis = [[float(a == axis) for _, a in parts] + [-bandwidth[axis]] for axis in mesh]
    of_load = [[float(j == i) for j, _ in parts] + [0.0] for i in range(len(loads))]
    best = linprog(
        [0.0] * len(parts) + [1.0], A_ub=on_axis, b_ub=[0.0] * 4, A_eq=of_load, b_eq=loads
    )
    assert found.time(bandwidth) == pytest.approx(best.fun, rel=1e-6)


def test_the_time_counts_executions_and_takes_groups_of_no_mesh_axis_as_all():
    # data: 3 x 768 bytes at 100 bytes per second; the others have room in model's links.
    found = report(collective(times=3), collective(axes=None, payload=200), collective(times=None))
    assert found.time({"data": 100, "model": 1000}) == 23.04
    # 3 x 768 + 100 bytes over both together take longer than those over data alone.
    assert found.time({"data": 100, "model": 1}) == pytest.approx(2404 / 101)
    assert report().time({}) == 0


def test_wrong_bandwidths_are_refused_all_at_once_with_a_fix():
    found = report(collective(), collective(axes=("model",)))
    with pytest.raises(MeshError) as caught:
        found.time({"modle": 1e9, "data": 0})
    assert caught.value.problems == (
        "mesh axis 'model': the step moves data over it, and its bandwidth is not given. "
        "Add 'model': 1e11 (bytes per second that one device sends over this mesh axis).",
        "mesh axis 'modle': the mesh does not have it (data=4, model=2). "
        "Remove it from the bandwidth.",
        "mesh axis 'data': its bandwidth must be a positive number of bytes per second, not 0.",
    )
    with pytest.raises(MeshError, match=r"Write time\(bandwidth=\{'data': 1e11, 'model': 1e11\}\)"):
        found.time(1e9)
    for wrong in (-1, float("nan"), float("inf"), "1e9", True, None):
        with pytest.raises(MeshError, match="'data': its bandwidth must be a positive number"):
            found.time({"data": wrong, "model": 1})


def blocks(count):
    sizes = {"attention/query": 1024, "mlp/up": 4096, "mlp/down": 4096}
    return [
        collective(payload=payload, layers=(f"model/block_{i}/{layer}",))
        for i in range(count)
        for layer, payload in sizes.items()
    ]


@pytest.mark.parametrize("count", [2, 32])
def test_equal_blocks_are_one_row_and_the_first_line_names_the_costliest(count):
    found = report(*blocks(count), collective("all-reduce", ("model",), 64, layers=("loss",)))
    blocks_text = f"model/block_{{0-{count - 1}}}"
    sent, share = {2: ("13.6 KiB", "88%"), 32: ("216.1 KiB", "89%")}[count]
    assert found.table().verdict == (
        f"{3 * count + 1} collectives in one step: on mesh (data=4, model=2) each device sends "
        f"{sent}, >99% of it by all-gather over data, {share} for {blocks_text}/mlp/{{down, up}}"
    )
    rows = [row[:2] for row in found.table().rows]
    assert rows == [
        (f"{blocks_text}/mlp/{{down, up}}", str(2 * count)),
        (f"{blocks_text}/attention/query", str(count)),
        ("loss", "1"),
    ]
    assert len(found.table(collapse=False).rows) == 3 * count + 1


def test_parts_that_the_whole_model_has_are_rows_of_their_own():
    names = ["embedder", "lm_head", "block_0/attention/query", "block_0/attention/key"]
    names += ["block_1/attention/query", "block_3/attention/key"]
    merged = collective(payload=64, layers=("m/block_0/mlp/up", "m/block_1/mlp/up", "optimizer"))
    of_all = collective(payload=32, layers=("m",))
    found = report(*(collective(layers=(f"m/{name}",)) for name in names), merged, of_all)
    assert [row[0] for row in found.table().rows] == [
        "m/{block_{0,3}/attention/key, block_{0-1}/attention/query}",
        "m/embedder",
        "m/lm_head",
        "m/block_{0-1}/mlp/up + optimizer",
        "m",
    ]


def test_a_long_table_ends_with_the_sum_of_what_is_not_shown():
    letters = [f"layer_{chr(ord('a') + i)}" for i in range(26)]
    found = report(
        *(collective(payload=1024 * (26 - i), layers=(n,)) for i, n in enumerate(letters))
    )
    rows = found.table().rows
    assert len(rows) == MOST_ROWS + 1
    # 3/4 of 1 + 2 + ... + 6 KiB.
    assert rows[-1] == ("6 more rows", "6", "", "", "", "", "15.8 KiB", "6%")


def test_json_holds_every_record_and_every_total():
    found = report(collective(), collective("all-reduce", None, layers=(), times=None))
    data = json.loads(found.to_json())
    assert data["mesh"] == MESH
    assert data["total"] == dataclasses.asdict(found.total)
    assert data["by_layer"]["mlp"]["wire_bytes"] == 768
    assert data["by_mesh_axis"]["groups of 2"]["unknown_places"] == 1
    first, second = data["collectives"]
    assert first.keys() == {field.name for field in dataclasses.fields(Collective)}
    assert (first["layers"], first["wire_bytes"], first["times"]) == (["mlp"], 768, 1)
    assert (second["mesh_axes"], second["times"], second["layers"]) == (None, None, [])
    assert first["parts"][0]["payload_bytes"] == 1024


def test_what_was_merged_is_divided_by_its_arrays_and_adds_up():
    """Of 1024 bytes in an all-reduce over 4, 768 and 256: 3/2 of each is sent, twice."""
    merged = collective(
        "all-reduce",
        times=2,
        layers=("m/up", "optimizer"),
        phase="backward",
        parts=(
            CollectivePart(("m/up",), ("m/up",), "backward", "gradient of params/m/up.w", 512),
            CollectivePart(("m/up",), ("m/up",), "backward", "gradient of params/m/up.b", 256),
            CollectivePart(("optimizer",), ("optimizer",), "optimizer", "", 256),
        ),
    )
    found = report(merged)
    up, optimizer = CollectiveTotal(1, 2, 1536, 2304), CollectiveTotal(1, 2, 512, 768)
    assert found.by_layer() == {"m/up": up, "optimizer": optimizer}
    assert found.by_phase() == {"backward": up, "optimizer": optimizer}
    assert (
        found.by_kind()
        == {"all-reduce": CollectiveTotal(1, 2, 2048, 3072)}
        == {"all-reduce": found.total}
    )
    assert [row[:1] + row[4:] for row in found.table().rows] == [
        ("m/up", "backward", "gradients", "2.2 KiB", "75%"),
        ("optimizer", "optimizer", "others", "768 B", "25%"),
    ]


def test_reduce_scatters_that_the_compiler_for_cpus_does_not_write_are_said():
    """Of an all-reduce of 1024 bytes over 4, 3/2 is sent; 3/8 less where half is scattered."""
    one = collective("all-reduce", scattered_bytes=512, times=2)
    assert report(one).wire_bytes_as_meant == 2 * (1024 * 3 / 2 - 512 * 3 / 4) == 2304
    said = "with those, as on GPUs and TPUs, each device sends 2.2 KiB"
    for device_kind, is_said in {"cpu": True, "TPU v5 lite": False}.items():
        found = dataclasses.replace(report(one), device_kind=device_kind)
        assert (said in " ".join(found.table().summary)) == is_said


def test_rows_of_next_to_nothing_are_one():
    small = [collective(payload=4, layers=(name,)) for name in ("a", "b", "c")]
    rows = report(collective(payload=4096), *small).table().rows
    assert [row[:2] for row in rows] == [("mlp", "1"), ("3 more rows", "3")]
    assert len(report(*small).table().rows) == 3
    unknown = [dataclasses.replace(one, times=None) for one in small]
    assert len(report(*unknown).table().rows) == 3
    assert len(report(collective(payload=4096), *unknown).table().rows) == 4
    empty = [dataclasses.replace(one, wire_bytes=0.0) for one in small]
    assert len(report(*empty).table().rows) == 3


def test_without_collectives_it_says_so():
    assert str(report(mesh={})).splitlines() == [
        "no collectives: the step moves nothing between devices"
    ]


def test_a_step_on_one_device_or_without_a_mesh_moves_nothing_and_says_so():
    x = jnp.ones((8, 8))
    assert str(collectives(jax.jit(jnp.dot), x, x)).splitlines() == [
        "no collectives: the step moves nothing between devices",
        "the step runs without a mesh, so on one device",
    ]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    found = collectives(jax.jit(summed), x)
    assert (found.collectives, found.mesh_shape) == ((), {"data": 1})
    assert found.notes == ("the step runs on a mesh of one device",)


def test_groups_of_one_device_move_nothing_and_are_left_out():
    mesh = make_mesh({"data": 8, "model": 1})
    summed = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "model", [(0, 0)]),
        mesh=mesh,
        in_specs=P(("data", "model")),
        out_specs=P(("data", "model")),
    )
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    found = collectives(jax.jit(summed), x)
    assert found.collectives == ()
    assert found.notes == ("left out, since its groups are of one device each: 1 collective",)


def test_a_program_that_is_compiled_takes_no_arguments_and_is_not_compiled_again():
    x = jnp.ones((4, 4))
    program = compile_step(jax.jit(jnp.dot), x, x)
    assert compile_step(program) is program
    with pytest.raises(RuleTypeError, match="Leave the arguments out, or give the step itself"):
        collectives(program, x, x)
