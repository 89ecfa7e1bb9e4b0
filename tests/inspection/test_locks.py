"""What a lock holds, what it compares, and its file; test_seeded_changes has what it finds."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import ProgramError
from tests.refusals import problems_of

ROOT = pathlib.Path(pzs.__file__).parents[1]
CPU = {"device": "cpu", "jax": "1", "jaxlib": "1"}
MESH = {"path": "mesh", "item": "sizes", "spec": "data=4"}
WEIGHTS = {"path": "block_0/w", "item": "parameters", "spec": "P('data')", "memory": 64}
TOTAL = {"path": "memory", "item": "temporaries", "memory": 4096}
GATHER = {"path": "block_0", "item": "all-gather over data, forward", "times": 50, "sent": 1000}


def make_lock(*rows, made_by=CPU, version=1):
    data = {"version": version, "made_by": made_by, "rows": rows}
    return pzs.ShardingLock.from_json(json.dumps(data))


def differences(report):
    rows = report.to_data()["rows"]
    return {(row["path"], row["what"], row["change"], row["ok"]) for row in rows}


# A step of two layers by hand, whose weights lie over "data", and a table in the host's memory


def loss(params, x):
    for name in ("up", "down"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ params[name]["w"] @ params[name]["v"] + params[name]["b"])
    return (x * x).mean()


def descend(params, table, x):
    table = jax.device_put(table, jax.memory.Space.Device)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x + table))


@functools.cache
def compiled():
    mesh = pzs.make_mesh({"data": 4, "model": 2})

    def struct(shape, *spec, **kind):
        sharding = NamedSharding(mesh, P(*spec), **kind)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    rows, table = struct((16, 16), "data"), struct((16, 16), "data", memory_kind="pinned_host")
    layer = {"w": rows, "v": rows, "b": struct((16,))}
    step = jax.jit(descend, donate_argnums=0)
    return pzs.compile_step(step, {"up": layer, "down": layer}, table, rows)


def test_of_holds_layouts_donation_communication_and_memory():
    step = compiled()
    rows = {row[:2]: row for row in pzs.ShardingLock.of(step).rows}
    assert rows["up/w", "parameters"][2:6] == ("P('data')", "float32[16,16]", "yes", 256)
    assert rows["x", "inputs"].donated == "no"
    # However XLA merges them: each layer reduces the gradients of its three arrays, and only of
    # those that are split keeps a part.
    for layer in ("up", "down"):
        assert rows[layer, "all-reduce over data, backward"].times == 1
        assert rows[layer, "reduce-scatter over data, backward"][6:] == (2, 2 * 3 / 4 * 16 * 16 * 4)
    # The memory of all rows is what XLA counts, but for what is noise; the host's is not in it.
    table = rows["table", "inputs"]
    assert (table.spec, table.memory) == ("P('data') in host memory", None)
    found = sum(row.memory or 0 for row in rows.values())
    assert 0 <= step.figures.total - found < step.figures.total / 100


def test_of_adds_up_constants_wherever_they_stand_in_the_code():
    x = pz.nx.ones({"a": 8})
    scale = pz.nn.ConstantRescale(by=jnp.ones(8))
    up = pz.nn.Linear.from_config("up", jax.random.key(0), {"a": 8}, {"b": 8})
    lock = pzs.ShardingLock.of(pz.nn.Sequential([scale, scale, up]), x)
    assert ("constants", 2 * 8 * 4) in {(row.item, row.memory) for row in lock.rows}
    assert lock.check(pz.nn.Sequential([pz.nn.Sequential([scale]), scale, up]), x)


def test_of_counts_once_what_runs_an_unknown_number_of_times():
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=compiled().step.arguments[-1].sharding)

    def run(x, limit):
        def add(carry):
            total, x = carry
            return total + x.sum(), 2 * x

        return jax.lax.while_loop(lambda carry: carry[0] < limit, add, (0.0, x))

    rows = pzs.ShardingLock.of(jax.jit(run), x, 1.0).rows
    item = "all-reduce over data, forward, unknown number of times"
    assert [(row.item, row.times) for row in rows if row.times] == [(item, 1)]


def test_of_a_step_compiled_ahead_is_that_of_its_program():
    ahead = dataclasses.replace(compiled(), topology=pzs.Topology("cpu:8"))
    assert pzs.ShardingLock.of(ahead) == pzs.ShardingLock.of(compiled())
    with pytest.raises(ProgramError):
        pzs.ShardingLock.of(dataclasses.replace(ahead, text=""))


def test_of_another_process_has_the_same_bytes():
    script = "from tests.inspection.test_locks import *; "
    script += "print(pzs.ShardingLock.of(compiled()).to_json())"
    environment = os.environ | {"PYTHONHASHSEED": "12", "PYTHONPATH": str(ROOT)}
    written = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert written.strip() == pzs.ShardingLock.of(compiled()).to_json().strip()


# Comparing, on locks by hand


@pytest.mark.parametrize(
    ("row", "change", "found"),
    [
        (WEIGHTS, {"spec": "P()"}, {("spec", "changed", None)}),
        (WEIGHTS, {"donated": "no"}, {("donated", "changed", None)}),
        (WEIGHTS, {"sent": 5}, {("sent", "grew", False)}),
        (GATHER, {"times": 51, "sent": 1010}, {("times", "grew", False)}),
        (GATHER, {"sent": 1040}, set()),
        (GATHER, {"sent": 1060}, {("sent", "grew", False)}),
        (GATHER, {"sent": 900}, {("sent", "shrank", True)}),
        (GATHER, {"path": "block_1"}, {("", "new", False), ("", "gone", True)}),
    ],
)
def test_compare_counts_exactly_and_bytes_within_the_tolerance(row, change, found):
    report = make_lock(row | change, MESH).compare(make_lock(row, MESH), tolerance=0.05)
    assert {(what, kind, ok) for _, what, kind, ok in differences(report)} == found
    assert bool(report) == (not found)


def test_check_improvements_pass_what_shrank_and_nothing_else(monkeypatch):
    monkeypatch.setattr(pzs.ShardingLock, "of", staticmethod(lambda rows: make_lock(*rows)))
    lock = make_lock(GATHER, WEIGHTS)
    for rows, passes in [
        ([GATHER | {"sent": 500}, WEIGHTS], True),
        ([WEIGHTS], True),
        ([GATHER | {"sent": 500}, WEIGHTS | {"spec": "P()"}], False),
        ([GATHER | {"sent": 2000}, WEIGHTS], False),
    ]:
        assert not lock.check(rows)
        assert bool(lock.check(rows, improvements="pass")) is passes


def test_compare_with_a_lock_of_another_compiler_is_of_layouts():
    lock, other = make_lock(WEIGHTS, GATHER, TOTAL), CPU | {"jaxlib": "2"}
    report = make_lock(WEIGHTS, GATHER | {"times": 99}, made_by=other).compare(lock)
    assert report
    assert len(report.notes) == 1
    assert not make_lock(WEIGHTS | {"spec": "P()"}, made_by=other).compare(lock)


# Files


def test_to_json_has_a_line_for_equal_blocks_and_compares_each():
    def blocks(count, **changes):
        return make_lock(*(GATHER | {"path": f"block_{i}"} | changes for i in range(count)))

    assert "block_{0-11}" in str(blocks(12, times=21).compare(blocks(12)))
    assert {path for path, *_ in differences(blocks(12).compare(blocks(11)))} == {"block_11"}
    text = blocks(12).to_json()
    assert text.count("\n") == 3


NUMBERS = st.sampled_from(["0", "1", "2", "10", "00"])
PATHS = st.builds("a_{}/b{}_w".format, NUMBERS, NUMBERS)


@given(st.dictionaries(PATHS, st.integers(0, 1), max_size=12))
def test_from_json_gives_back_what_to_json_wrote(paths):
    rows = [WEIGHTS | {"path": path, "spec": "P()" * times} for path, times in paths.items()]
    lock = make_lock(*rows)
    again = pzs.ShardingLock.from_json(lock.to_json())
    assert again == lock
    assert {row.path: row.spec == "P()" for row in again.rows} == paths


def test_load_of_no_lock_says_where_and_how_to_write_one(tmp_path):
    path = tmp_path / "deep" / "lock.json"
    text = make_lock(WEIGHTS).to_json()
    conflict, renamed = "<<<<<<< HEAD\n" + text, text.replace("item", "kind")
    version = text.replace('"version": 1', '"version": 2')
    for each in (None, "", "[]", "\xff", text[:-9], conflict, renamed, version):
        make_lock(WEIGHTS).save(path)
        assert pzs.ShardingLock.load(path) == make_lock(WEIGHTS)
        path.unlink() if each is None else path.write_text(each, "latin-1")
        (problem,) = problems_of(pzs.LockError, pzs.ShardingLock.load, path)
        assert problem.path == str(path)
        assert "--update-sharding-locks" in problem.fix
