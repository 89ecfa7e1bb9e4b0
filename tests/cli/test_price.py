"""``penzai-shard price`` and ``bill``: what they print, the lock, and the exit status."""

import json

import pytest

FILES = {
    "job.py": """
import jax
import jax.numpy as jnp
import penzai_shard as pzs
from jax.sharding import NamedSharding, PartitionSpec

mesh = pzs.make_mesh({"data": 4, "model": 2})
sharding = NamedSharding(mesh, PartitionSpec("data"))
number = 8


def build():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    y = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return pzs.compile_step(jax.jit(lambda x, y: x @ x + y), x, y)
"""
}


@pytest.fixture
def bill(run, tmp_path):
    """Calls the command with the locks of some rows before and now."""

    def call(before, now, *options, device="cpu"):
        for name, rows, own in (("base", before, "cpu"), ("head", now, device)):
            lock = {"version": 1, "made_by": {"device": own}, "rows": rows}
            (tmp_path / f"{name}.json").write_text(json.dumps(lock))
        return run("bill", "base.json", "head.json", *options)

    return call


def test_price_prints_memory_and_collectives_and_writes_a_lock(run, tmp_path):
    status, out, _ = run("price", "job.py:build")
    assert status == 0
    assert "all-gather over data" in out
    assert "payload" not in out
    assert out.count("these arguments are on no mesh") == 1
    assert "payload" in run("price", "job.py:build", "--all")[1]
    status, out, _ = run("price", "job.py:build", "--json", "-")
    assert json.loads(out)["version"] == 1
    assert run("price", "job.py:build", "--json", "base.json") == (0, "", "")
    assert (tmp_path / "base.json").read_text() == out
    status, out, _ = run("bill", "base.json", "base.json")
    assert (status, "| " in out) == (0, False)


def a_row(path, **cells):
    return {"path": path, "item": "all-gather over data, forward", **cells}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"sent": 500}, 0),
        ({"sent": 1500}, 1),
        ({"sent": 1010}, 0),
        ({"times": 3}, 1),
        ({"spec": "P(None, ('a', 'b'))"}, 0),
    ],
)
def test_bill_status_is_whether_something_grew(bill, changes, status):
    before = [a_row(f"block_{i}", times=1, sent=1000) for i in range(12)]
    now = [row | changes for row in before]
    got, out, _ = bill(before, now)
    assert got == status
    # Twelve equal blocks are one row.
    assert out.count("`block_{0-11}`") == out.count("block_") <= 1
    assert ("nothing differs" in out) == (changes.get("sent") == 1010 or not changes)
    assert bill(before, now, "--tolerance", "0.6")[0] == ("times" in changes)


def test_bill_is_short_and_says_first_what_grew(bill):
    names = [f"layer_{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(100)]
    before = [a_row(name, times=2, sent=2000) for name in names]
    now = [a_row(name, times=2, sent=1000 + i) for i, name in enumerate(names)]
    status, out, _ = bill(before, [*now[:-1], now[-1] | {"sent": 9000}])
    lines = out.splitlines()
    assert status == 1
    assert "sent 195.3 KiB -> 110.2 KiB (-44%)" in lines[0]
    assert len(lines) <= 60
    assert names[-1] in next(line for line in lines if "| `layer_" in line)
    assert "and 70 more rows" in out


def test_bill_says_what_sums_of_bytes_do_not(bill):
    array = {"path": "w", "item": "parameters", "spec": "P()", "donated": "yes", "memory": 8}
    mesh = {"path": "mesh", "item": "sizes", "spec": "data=4"}
    again = {"path": "n", "item": "compiles again in step 2", "spec": "int32 -> int8", "times": 1}
    kept = {"path": "kept", "item": "inputs", "spec": "P()"}
    before = [mesh, array, kept | {"donated": "no"}]
    now = [kept | {"donated": "yes"}, mesh | {"spec": "data=8"}, again]
    status, out, _ = bill(before, [*now, array | {"spec": "P('a')", "donated": "no"}])
    assert status == 1
    remarks = [line for line in out.splitlines() if line.startswith("- ")]
    for words in ("data=4 -> data=8", "donated any more: 1", "again: 1", "layout or type: 1"):
        assert any(words in remark for remark in remarks)
    # Of other compilers: layouts only, and no sums.
    status, out, _ = bill(before, [*before, a_row("w", sent=9)], device="TPU v4")
    assert (status, "| " in out, "only layouts" in out) == (0, False, True)


def test_bill_is_markdown_whatever_names_hold(bill):
    row = {"path": "__a__|`b", "item": "x|y", "type": "key<fry>[]", "memory": 8}
    _, out, _ = bill([], [row])
    row = next(line for line in out.splitlines() if "__a__" in line)
    assert row == r"| `__a__\|'b` | x&#124;y |  | type key&lt;fry&gt;[], memory 8 B | new |"
