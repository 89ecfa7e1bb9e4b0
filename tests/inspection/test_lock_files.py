"""The text of a lock: what it looks like, that nothing is lost, and that no damage gets through."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penzai_shard.errors import LockError
from penzai_shard.inspection.locks.lock_content import (
    CollectiveCount,
    CollectiveGroup,
    LockContent,
    LockedArray,
    locked_arrays,
)
from penzai_shard.inspection.locks.lock_files import lock_from_text, lock_to_text
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.path_folding import paths_in_ranges, ranged_paths

UP = LockedArray("parameters", ("data", None, ("x", "y")), (32, 4, 64), "float32", donated=True)
TOKENS = LockedArray("inputs", None, (8, 16), "int32", on_host=True, chosen=(2, 16))
TABLE = LockedArray("parameters", ("data",), (16, 8), "float32", true_shape=(13, 8))
ATTENTION_GATHERS = {
    CollectiveGroup((f"lm/block_{i}/attention",), "backward", "all-gather", "data"): (
        CollectiveCount(2, 65536)
    )
    for i in range(12)
}
MERGED = CollectiveGroup(("lm/block_0/mlp", "lm/block_1/mlp"), "optimizer", "all-reduce", "data")
NOBODYS = CollectiveGroup((), "", "collective-permute", "data (2 of 4)")
CONTENT = LockContent(
    mesh=(("data", 4), ("x", 2), ("y", 2)),
    device_kind="cpu",
    made_with={"jaxlib": "0.10.2", "jax": "0.10.2"},
    arrays={f"params/lm/block_{i}/mlp.up": UP for i in range(12)}
    | {"inputs/tokens": TOKENS, "params/lm/table": TABLE},
    collectives={
        **ATTENTION_GATHERS,
        MERGED: CollectiveCount(1, 128),
        NOBODYS: CollectiveCount(1, 64, unknown_times=1),
    },
    not_counted={"a custom call of 'mine'": 2},
    memory={"parameters": 1000, "temporaries": 0},
)
TEXT = """\
{
  "format": "penzai_shard sharding lock",
  "version": 1,
  "mesh": {"data": 4, "x": 2, "y": 2},
  "device_kind": "cpu",
  "made_with": {"jax": "0.10.2", "jaxlib": "0.10.2"},
  "arrays": [
    {"path": "params/lm/block_{0-11}/mlp.up", "part": "parameters", "spec": ["data", null, \
["x", "y"]], "shape": [32, 4, 64], "dtype": "float32", "donated": true},
    {"path": "params/lm/table", "part": "parameters", "spec": ["data"], "shape": [16, 8], \
"dtype": "float32", "true_shape": [13, 8]},
    {"path": "inputs/tokens", "part": "inputs", "spec": null, "shape": [8, 16], "dtype": "int32", \
"on_host": true, "chosen": [2, 16]}
  ],
  "collectives": [
    {"layer": "lm/block_{0-11}/attention", "phase": "backward", "kind": "all-gather", \
"mesh_axes": "data", "count": 2, "payload_bytes": 65536},
    {"layers": ["lm/block_{0-1}/mlp"], "phase": "optimizer", "kind": "all-reduce", \
"mesh_axes": "data", "count": 1, "payload_bytes": 128},
    {"layers": [], "phase": "", "kind": "collective-permute", "mesh_axes": "data (2 of 4)", \
"count": 1, "payload_bytes": 64, "unknown_times": 1}
  ],
  "not_counted": {
    "a custom call of 'mine'": 2
  },
  "memory": {
    "parameters": 1000,
    "temporaries": 0
  },
"""


def test_a_lock_has_a_line_for_each_array_or_group_of_equal_ones_and_is_read_back():
    text = lock_to_text(CONTENT)
    assert text.startswith(TEXT)
    assert text.removeprefix(TEXT).startswith('  "checksums": {"head": ')
    assert lock_from_text(text) == CONTENT
    assert json.loads(text)["version"] == 1


def test_only_arrays_that_are_padded_have_true_lengths_in_the_file():
    assert lock_to_text(CONTENT).count('"true_shape"') == 1
    divides = StepArray("x", "inputs", (16, 8), "int32", None, true_shape=(16, 8))
    padded = dataclasses.replace(divides, true_shape=(13, 8))
    assert [locked_arrays([one])["x"].true_shape for one in (divides, padded)] == [None, (13, 8)]


def test_the_order_in_which_a_lock_was_made_does_not_show():
    backwards = dataclasses.replace(
        CONTENT,
        made_with=dict(reversed(CONTENT.made_with.items())),
        arrays=dict(reversed(CONTENT.arrays.items())),
        collectives=dict(reversed(CONTENT.collectives.items())),
    )
    assert lock_to_text(backwards) == lock_to_text(CONTENT)


def test_one_block_that_changes_parts_its_group_and_nothing_else():
    whole = dataclasses.replace(UP, spec=())
    changed = dataclasses.replace(
        CONTENT, arrays=CONTENT.arrays | {"params/lm/block_3/mlp.up": whole}
    )
    before, after = (lock_to_text(c).splitlines() for c in (CONTENT, changed))
    added = [line for line in after if line not in before]
    assert [re.search(r'"path": "([^"]*)"|checksums', line)[1] for line in added] == [
        "params/lm/block_{0-2,4-11}/mlp.up",
        "params/lm/block_3/mlp.up",
        None,
    ]


def test_two_arrays_of_one_path_are_kept_apart_and_constants_left_out():
    array = StepArray("x", "inputs", (4,), "int32", None)
    constant = dataclasses.replace(array, path="unbound_model/epsilon", part="constants")
    assert list(locked_arrays([array, constant, array])) == ["x", "x (2)"]


def test_an_empty_lock_is_read_back():
    empty = LockContent((), "cpu", {}, {}, {}, {}, {})
    assert lock_from_text(lock_to_text(empty)) == empty


NAMES = st.text(alphabet="ab/_.{}-,0129", max_size=8)


@given(st.sets(NAMES, max_size=12))
@settings(max_examples=80)
def test_paths_in_ranges_are_those_that_were_put_there(paths):
    texts = ranged_paths(paths)
    found = [path for text in texts for path in paths_in_ranges(text)]
    assert len(found) == len(paths)
    assert set(found) == paths
    assert texts == ranged_paths(sorted(paths, reverse=True))


def test_blocks_of_two_stages_are_one_text_only_where_all_of_them_are_there():
    paths = {f"stage_{s}/block_{b}" for s in range(2) for b in range(3)}
    assert ranged_paths(paths) == ["stage_{0-1}/block_{0-2}"]
    assert ranged_paths(paths - {"stage_1/block_2"}) == [
        "stage_0/block_{0-2}",
        "stage_1/block_{0-1}",
    ]


def edited(old, new):
    def change(text):
        assert old in text, old
        return text.replace(old, new, 1)

    return change


def without_line(start):
    def change(text):
        lines = text.splitlines(keepends=True)
        kept = [line for line in lines if not line.strip().startswith(start)]
        assert len(kept) == len(lines) - 1
        return "".join(kept)

    return change


NOT_A_LOCK = "this is not a sharding lock: "
CHANGED = ": changed after they were written. Write the lock anew instead of changing it."
# What was done to a lock, and what is said of it.
DAMAGE = {
    "empty": (lambda text: "", NOT_A_LOCK + "Expecting value"),
    "cut off": (lambda text: text[:400], NOT_A_LOCK + "Unterminated string starting at: line "),
    "not UTF-8 read as such": (lambda text: "\x00" + text, NOT_A_LOCK),
    "nested without end": (lambda text: "[" * 100_000, NOT_A_LOCK),
    "merge conflict": (
        edited('  "arrays"', '<<<<<<< ours\n  "arrays"'),
        NOT_A_LOCK + "it has the marks of a merge conflict",
    ),
    "other JSON": (lambda text: "[1]", "this JSON is not a sharding lock"),
    "a later version": (
        edited('"version": 1', '"version": 2'),
        "this sharding lock has version 2, and 1 is known",
    ),
    "a key twice": (
        edited('"version": 1', '"version": 1, "version": 1'),
        NOT_A_LOCK + "'version' is in it twice",
    ),
    "no memory": (
        lambda text: re.sub(r'  "memory": \{[^}]*\},\n', "", text),
        "memory: is missing",
    ),
    "a section more": (edited('  "arrays"', '  "notes": [],\n  "arrays"'), "notes: is not known"),
    "a list for an object": (
        edited('{"data": 4, "x": 2, "y": 2}', '["data"]'),
        'mesh: is ["data"], not an object',
    ),
    "no checksums": (without_line('"checksums"'), NOT_A_LOCK),
    "checksums of another kind": (
        lambda text: re.sub(r'"checksums": .*', '"checksums": 7', text),
        "arrays" + CHANGED,
    ),
    "another spec": (edited('["data", null,', '["x", null,'), "arrays" + CHANGED),
    "an array less": (without_line('{"path": "params/lm/block'), "arrays" + CHANGED),
    "blocks less": (edited("block_{0-11}/mlp.up", "block_{0-10}/mlp.up"), "arrays" + CHANGED),
    "a count": (edited('"count": 2', '"count": 3'), "collectives" + CHANGED),
    "a collective less": (without_line('{"layers": ["lm'), "collectives" + CHANGED),
    "bytes": (edited('"payload_bytes": 65536', '"payload_bytes": 99999'), "collectives" + CHANGED),
    "what is not counted": (edited("'mine'\": 2", "'mine'\": 1"), "not_counted" + CHANGED),
    "memory": (edited('"temporaries": 0', '"temporaries": 9'), "memory" + CHANGED),
    "mesh": (edited('"data": 4', '"data": 8'), "mesh, device_kind, made_with" + CHANGED),
    "order of the mesh": (
        edited('"x": 2, "y": 2', '"y": 2, "x": 2'),
        "mesh, device_kind, made_with" + CHANGED,
    ),
    "device": (edited('"cpu"', '"TPU v4"'), "mesh, device_kind, made_with" + CHANGED),
    "a mesh axis of no size": (edited('"data": 4', '"data": 0'), "mesh: has 0 for 'data'"),
    "a device kind of no name": (edited('"cpu"', "null"), "device_kind: is None, not a text"),
    "an unknown part": (
        edited('"part": "parameters"', '"part": "weights"'),
        "arrays entry 1: 'part' is 'weights'",
    ),
    "a spec of numbers": (edited('["data", null,', "[1, null,"), "arrays entry 1: 'spec' is [1, "),
    "a shape of texts": (edited("[8, 16]", '["8", 16]'), "arrays entry 3: 'shape' is ['8', 16]"),
    "a size below zero": (edited("[8, 16]", "[-8, 16]"), "arrays entry 3: 'shape' is [-8, 16]"),
    "no dtype": (edited(', "dtype": "int32"', ""), "arrays entry 3: 'dtype' is missing"),
    "donated by words": (
        edited('"donated": true', '"donated": "yes"'),
        "arrays entry 1: 'donated'",
    ),
    "a choice of texts": (edited("[2, 16]", '["2"]'), "arrays entry 3: 'chosen' is ['2']"),
    "on the host by words": (
        edited('"on_host": true', '"on_host": 1'),
        "arrays entry 3: 'on_host'",
    ),
    "true lengths of texts": (
        edited("[13, 8]", '["13", 8]'),
        "arrays entry 2: 'true_shape' is ['13', 8]",
    ),
    "a true length too few": (edited("[13, 8]", "[13]"), "arrays entry 2: 'true_shape' is [13]"),
    "more than is stored": (
        edited("[13, 8]", "[17, 8]"),
        "arrays entry 2: 'true_shape' is [17, 8]",
    ),
    "no padding": (edited("[13, 8]", "[16, 8]"), "arrays entry 2: 'true_shape' is [16, 8]"),
    "other true lengths": (edited("[13, 8]", "[14, 8]"), "arrays" + CHANGED),
    "another choice": (edited("[2, 16]", "[4, 16]"), "arrays" + CHANGED),
    "a member more": (
        edited('"int32"', '"int32", "note": 1'),
        "arrays entry 3: 'note' is not known",
    ),
    "an entry of no object": (
        edited('{"path": "inputs', '7, {"path": "inputs'),
        "arrays entry 3: 7",
    ),
    "an array twice": (
        edited('"inputs/tokens"', '"params/lm/block_3/mlp.up"'),
        "arrays entry 3: is of something that an earlier entry is of",
    ),
    "a brace": (
        edited("block_{0-11}/mlp", "block_{0-}/mlp"),
        "arrays entry 1: 'params/lm/block_{0",
    ),
    "a range that falls": (
        edited("{0-11}/mlp", "{11-0}/mlp"),
        "{11-0}/mlp.up' has numbers in braces that do not rise",
    ),
    "numbers twice": (
        edited("{0-11}/mlp", "{0-5,5-11}/mlp"),
        "{0-5,5-11}/mlp.up' has numbers in braces that do not rise",
    ),
    "a range without end": (edited("{0-11}/mlp", "{0-999999999999}/mlp"), "arrays entry 1: "),
    "a count of zero": (edited('"count": 2', '"count": 0'), "collectives entry 1: 'count' is 0"),
    "a count of a half": (
        edited('"count": 2', '"count": 2.5'),
        "collectives entry 1: 'count' is 2.5",
    ),
    "an unknown phase": (edited('"backward"', '"sideways"'), "collectives entry 1: 'phase'"),
    "a layer of no text": (
        edited('"layers": [],', '"layers": 1,'),
        "collectives entry 3: 'layers'",
    ),
    "memory by words": (edited('"temporaries": 0', '"temporaries": "0"'), "memory: has '0' for"),
    "memory as truth": (edited('"temporaries": 0', '"temporaries": true'), "memory: has True for"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_lock_is_refused_with_its_place(name):
    change, message = DAMAGE[name]
    with pytest.raises(LockError, match=re.escape(message)):
        lock_from_text(change(lock_to_text(CONTENT)))


def test_all_that_is_wrong_with_a_lock_is_said_at_once():
    text = lock_to_text(CONTENT).replace('"int32"', "7").replace('"temporaries": 0', '"t": -1')
    with pytest.raises(LockError) as caught:
        lock_from_text(text.replace('"count": 2', '"count": 3'))
    starts = [problem.partition(":")[0] for problem in caught.value.problems]
    assert starts == ["arrays entry 3", "memory", "collectives"]


def test_a_lock_that_a_formatter_has_spaced_is_the_same_lock():
    text = json.dumps(json.loads(lock_to_text(CONTENT)), indent=4).replace("\n", "\r\n")
    assert lock_from_text(text) == CONTENT


def test_something_else_than_text_is_refused():
    with pytest.raises(LockError, match=r"of type bytes\. Give the text of to_json\(\)"):
        lock_from_text(b"{}")
