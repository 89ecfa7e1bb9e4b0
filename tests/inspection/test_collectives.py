"""The report of collectives: its sums, views and layers, on records that are written by hand."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import penzai_shard as pzs
from penzai_shard.inspection.attribution import Collective, Part
from penzai_shard.inspection.collectives import CollectiveReport, Total
from tests.refusals import refused

MESH = {"data": 4, "model": 2}


def collective(
    *layers, kind="all-gather", axes=("data",), payload=1024, times=1, parts=None, is_maybe=False
):
    size = 4 if axes is None or "data" in axes else 2
    text = "groups of 4" if axes is None else "+".join(axes)
    parts = parts or (Part(layers, "forward", "", payload),)
    return Collective(kind, "", axes, text, size, payload, times, is_maybe, parts)


def report(*collectives, **others):
    return CollectiveReport(collectives, MESH, **others)


def test_totals_count_every_execution():
    merged = collective("mlp", "loss", kind="all-reduce", axes=("model",), payload=512)
    found = report(collective("mlp", times=3), merged)
    first, second = Total(3, 3072, 2304), Total(1, 512, 512)
    assert list(found.by_layer().items()) == [("mlp", first), ("mlp + loss", second)]
    assert found.by_kind() == {"all-gather": first, "all-reduce": second}
    assert found.by_mesh_axis() == {"data": first, "model": second}
    assert found.by_phase() == {"forward": Total(4, 3584, 2816)} == {"forward": found.total}
    assert "82% of it in all-gather over data for mlp" in found.report().verdict
    assert "by mesh axes: data 2.2 KiB, model 512 B" in found.report().notes
    names = ("layer", "times", "sent", "remark")
    rows = [[row[name] for name in names] for row in json.loads(found.to_json())["rows"]]
    assert rows == [["mlp", 3, 2304, ""], ["several layers", 1, 512, "for mlp, loss"]]


def test_merged_collective_is_divided_by_its_arrays():
    """Of 1024 bytes in an all-reduce over 4, 3/2 of each is sent, twice; of a slice half of it."""
    up, norm = (Part(("up",), "backward", "gradient of w", n, n == 512) for n in (512, 256))
    others = Part(("optimizer",), "optimizer", "", 256)
    found = report(collective(kind="all-reduce", times=2, parts=(up, norm, others)))
    totals = Total(2, 1536, 2304), Total(2, 512, 768)
    assert tuple(found.by_layer().values()) == tuple(found.by_phase().values()) == totals
    assert found.by_kind() == {"all-reduce": found.total} == {"all-reduce": Total(2, 2048, 3072)}
    assert found.wire_bytes_with_reduce_scatters == 3072 - 768


def test_unknown_times_are_in_no_sum_and_are_listed():
    loop = collective("mlp", payload=4096, times=None)
    found = report(collective("mlp"), loop)
    assert (found.unknown_times, found.wire_bytes) == ((loop,), 768)
    (row,) = (row for row in found.to_data()["rows"] if row["times"] is None)
    assert (row["layer"], row["sent"], "3.0 KiB" in row["remark"]) == ("mlp", None, True)
    assert "1 collective in one step, without 1 that" in found.report().verdict
    assert found.to_data()["unknown_times"] == 1


def test_owned_by_finds_layers_and_what_is_in_them():
    up, other, unknown = collective("block_1/mlp/up"), collective("block_11/mlp/up"), collective()
    merged = collective("block_1/attention/query", "block_1/attention/key")
    owners = [x for one in (up, merged, other) for x in one.parts[0].layers]
    found = report(up, merged, other, unknown, layers=(*owners, "block_2/norm"))
    assert found.owned_by("block_1") == (up, merged)
    assert found.owned_by("block_*/mlp") == found.owned_by("**/up") == (up, other)
    assert found.owned_by("block_2") == found.owned_by("optimizer") == ()
    assert found.owned_by("unattributed") == found.unattributed == (unknown,)
    (problem,) = refused(pzs.SelectionError, found.owned_by, "block_1/mlp/pu").values()
    assert "'block_1/mlp/up'" in problem.fix


def test_rows_say_what_moves():
    words = {
        "gradient of activation f32[8] of mlp": "gradients of activations",
        "gradient of params/mlp/w": "gradients",
        "activation_scale": "arguments",
        "": "",
    }
    parts = tuple(Part(("mlp",), "forward", moves, 1024) for moves in words)
    found = report(collective(parts=parts)).to_data()["rows"]
    assert [row["moves"] for row in found] == [*words.values()]


def test_notes_say_what_is_not_certain():
    parts = (Part((), "backward", "", 1024, keeps_slice=True),)
    maybe = collective(kind="all-reduce", is_maybe=True, parts=parts)
    notes = report(maybe, device_kind="cpu", remarks=("a remark",)).report().notes
    assert len(notes) == 4
    assert "each device sends 768 B" in notes[0]


def test_collectives_without_a_mesh_are_none():
    found = pzs.collectives(lambda x: x @ x, jnp.ones((8, 8)))
    assert (found.collectives, found.wire_bytes) == ((), 0)
    assert "no collectives" in str(found)


def test_bfloat16_is_noted_where_cpus_may_move_it():
    mesh = pzs.make_mesh({"data": 8}, abstract=True)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)
    mixed = jax.jit(lambda x: x.astype(jnp.bfloat16).sum(0))
    for step, is_noted in ((mixed, True), (lambda x: x.sum(0), False)):
        assert ("bfloat16" in str(pzs.collectives(step, x))) is is_noted
