"""What is said of a step that is not as its lock, in made-up figures."""

import dataclasses
import json
import re

import pytest

from penzai_shard.errors import LockError, RuleTypeError
from penzai_shard.inspection.locks.lock_comparison import LockReport, compared
from penzai_shard.inspection.locks.lock_content import (
    CollectiveCount,
    CollectiveGroup,
    LockContent,
    LockedArray,
)

UP = LockedArray("parameters", ("data", "model"), (32, 64), "float32", donated=True)
PATH = "params/block_0/up"
GROUP = CollectiveGroup(("block_0/attention",), "backward", "all-gather", "data")
COUNT = CollectiveCount(4, 65536)
MIB = 2**20
LOCK = LockContent(
    mesh=(("data", 4), ("model", 2)),
    device_kind="cpu",
    made_with={"jax": "0.10.2"},
    arrays={PATH: UP},
    collectives={GROUP: COUNT},
    not_counted={},
    memory={"outputs": 2 * MIB, "donated": MIB, "temporaries": 12 * MIB, "total": 20 * MIB},
)


def differences(step, tolerance=0.05):
    report = compared(LOCK, step, tolerance, "fail")
    return {str(each): each.effect for each in report.differences}


def of_array(**changes):
    return dataclasses.replace(LOCK, arrays={PATH: dataclasses.replace(UP, **changes)})


def of_collectives(*counts):
    return dataclasses.replace(LOCK, collectives=dict(counts))


def of_memory(**items):
    return dataclasses.replace(LOCK, memory={**LOCK.memory, **items})


OTHER_AXES = dataclasses.replace(GROUP, mesh_axes="model", phase="forward")
MERGED = CollectiveGroup(("block_0/a", "block_0/b"), "optimizer", "all-reduce", "data")
NOBODYS = CollectiveGroup((), "", "all-to-all", "data")
CASES = [
    (
        of_array(spec=("data",)),
        {f"{PATH}: spec was P('data', 'model'), is now P('data')": "changed"},
    ),
    (of_array(spec=()), {f"{PATH}: spec was P('data', 'model'), is now P()": "changed"}),
    (
        of_array(spec=None),
        {f"{PATH}: spec was P('data', 'model'), is now left to the compiler": "changed"},
    ),
    (
        of_array(spec=None, chosen=(8, 64)),
        {
            f"{PATH}: spec was P('data', 'model'), is now left to the compiler, [8, 64] on each "
            "device": "changed"
        },
    ),
    (
        of_array(on_host=True),
        {f"{PATH}: was in the device's memory, is now in the host's memory": "changed"},
    ),
    (
        of_array(dtype="bfloat16"),
        {f"{PATH}: was float32[32,64], is now bfloat16[32,64]": "changed"},
    ),
    (of_array(shape=(64, 32)), {f"{PATH}: was float32[32,64], is now float32[64,32]": "changed"}),
    (
        of_array(true_shape=(32, 63)),
        {f"{PATH}: was float32[32,64], is now float32[32,63(64)]": "changed"},
    ),
    (
        of_array(part="constants"),
        {f"{PATH}: was one of the parameters, is now of the constants": "changed"},
    ),
    (of_array(donated=False), {f"{PATH}: was donated, is not any more": "worse"}),
    (dataclasses.replace(LOCK, arrays={}), {f"{PATH}: is gone": "changed"}),
    (
        dataclasses.replace(LOCK, arrays={**LOCK.arrays, "params/b": UP}),
        {
            "params/b: is new among the parameters, float32[32,64], "
            "spec P('data', 'model')": "changed"
        },
    ),
    (
        of_collectives((GROUP, CollectiveCount(5, 65536))),
        {
            "block_0/attention: 4 all-gathers over 'data' (64.0 KiB) in the backward pass "
            "became 5 (64.0 KiB)": "worse"
        },
    ),
    (
        of_collectives((GROUP, CollectiveCount(3, 49152))),
        {
            "block_0/attention: 4 all-gathers over 'data' (64.0 KiB) in the backward pass "
            "became 3 (48.0 KiB)": "better"
        },
    ),
    (
        of_collectives((GROUP, CollectiveCount(1, 131072))),
        {
            "block_0/attention: 4 all-gathers over 'data' (64.0 KiB) in the backward pass "
            "became 1 (128.0 KiB)": "worse"
        },
    ),
    (
        of_collectives((GROUP, CollectiveCount(4, 131072))),
        {
            "block_0/attention: 4 all-gathers over 'data' in the backward pass: "
            "64.0 KiB → 128.0 KiB (+100%, tolerance 5%)": "worse"
        },
    ),
    (
        of_collectives((GROUP, CollectiveCount(4, 65536, unknown_times=1))),
        {
            "block_0/attention: 1 of 4 all-gathers over 'data' (64.0 KiB) in the backward pass "
            "run an unknown number of times, 0 of 4 did": "worse"
        },
    ),
    (
        of_collectives((GROUP, COUNT), (OTHER_AXES, CollectiveCount(1, 64))),
        {"block_0/attention: 1 all-gather over 'model' (64 B) is new in the forward pass": "worse"},
    ),
    (
        of_collectives((GROUP, COUNT), (MERGED, CollectiveCount(2, 64))),
        {"block_0/{a, b}: 2 all-reduces over 'data' (64 B) are new in the optimizer": "worse"},
    ),
    (
        of_collectives((GROUP, COUNT), (NOBODYS, CollectiveCount(1, 64))),
        {"unattributed: 1 all-to-all over 'data' (64 B) is new": "worse"},
    ),
    (
        of_collectives(),
        {
            "block_0/attention: 4 all-gathers over 'data' (64.0 KiB) are gone from the "
            "backward pass": "better"
        },
    ),
    (
        dataclasses.replace(LOCK, not_counted={"a custom call of 'mine'.": 1}),
        {"not counted: 0 became 1: a custom call of 'mine'.": "worse"},
    ),
    (
        of_memory(temporaries=19 * MIB),
        {"temporaries: 12.0 MiB → 19.0 MiB (+58.3%, tolerance 5%)": "worse"},
    ),
    (
        of_memory(temporaries=6 * MIB),
        {"temporaries: 12.0 MiB → 6.0 MiB (-50%, tolerance 5%)": "better"},
    ),
    (of_memory(donated=0), {"donated: 1.0 MiB → 0 B (-100%, tolerance 5%)": "worse"}),
    (of_memory(donated=2 * MIB), {"donated: 1.0 MiB → 2.0 MiB (+100%, tolerance 5%)": "better"}),
    (
        of_memory(outputs=MIB, donated=0),
        {
            "outputs: 2.0 MiB → 1.0 MiB (-50%, tolerance 5%)": "better",
            "donated: 1.0 MiB → 0 B (-100%, tolerance 5%)": "changed",
        },
    ),
    (of_memory(padding=8), {"padding: 0 B → 8 B (tolerance 5%)": "worse"}),
]


@pytest.mark.parametrize(("step", "expected"), CASES)
def test_every_difference_is_said_in_words_with_its_effect(step, expected):
    assert differences(step) == expected


def test_bytes_may_differ_by_the_tolerance_and_not_by_more():
    just, above = int(12 * MIB * 1.05), int(12 * MIB * 1.05) + 1
    assert not differences(of_memory(temporaries=just))
    assert differences(of_memory(temporaries=above))
    assert differences(of_memory(temporaries=12 * MIB + 1), tolerance=0) == {
        "temporaries: 12,582,912 B → 12,582,913 B (+7.95e-06%, tolerance 0%)": "worse"
    }
    assert not differences(of_memory(temporaries=24 * MIB), tolerance=1)
    assert differences(of_collectives((GROUP, CollectiveCount(5, 65536))), tolerance=100)


def test_improvements_fail_unless_they_are_let_pass():
    better = of_collectives()
    strict = compared(LOCK, better, 0.05, "fail")
    assert not strict
    assert "lock it anew, so that it stays better" in str(strict)
    loose = compared(LOCK, better, 0.05, "pass")
    assert loose
    assert loose.differences == strict.differences
    assert str(loose).startswith("accepted: 1 better")
    both = dataclasses.replace(better, memory=of_memory(temporaries=24 * MIB).memory)
    assert not compared(LOCK, both, 0.05, "pass")
    assert [d.where for d in compared(LOCK, both, 0.05, "pass").failures] == ["temporaries"]
    assert "lock it anew" not in str(compared(LOCK, both, 0.05, "fail"))


def test_another_mesh_or_kind_of_device_is_refused_and_not_compared():
    other = dataclasses.replace(LOCK, mesh=(("data", 8),), device_kind="TPU v5 lite")
    with pytest.raises(LockError) as caught:
        compared(LOCK, other, 0.05, "fail")
    assert caught.value.problems == (
        "mesh: the lock is of (data=4, model=2), the step of (data=8).",
        "device kind: the lock is of 'cpu', the step of 'TPU v5 lite'.",
    )
    for mesh in ((("model", 2), ("data", 4)), (("data", 2), ("model", 4)), ()):
        with pytest.raises(LockError, match=r"mesh: the lock is of \(data=4, model=2\)"):
            compared(LOCK, dataclasses.replace(LOCK, mesh=mesh), 0.05, "fail")


def test_options_that_mean_nothing_are_refused():
    for tolerance in (-0.1, float("nan"), float("inf"), "5%", True, None):
        with pytest.raises(RuleTypeError, match=re.escape(f"tolerance={tolerance!r} is not a")):
            compared(LOCK, LOCK, tolerance, "fail")
    with pytest.raises(RuleTypeError, match="improvements='warn' is not 'fail' or 'pass'"):
        compared(LOCK, LOCK, 0.05, "warn")


def test_another_compiler_is_named_where_something_differs_and_not_otherwise():
    newer = dataclasses.replace(LOCK, made_with={"jax": "0.12.0", "libtpu": "0.1"})
    assert compared(LOCK, newer, 0.05, "fail").notes == ()
    worse = dataclasses.replace(newer, memory=of_memory(temporaries=24 * MIB).memory)
    assert compared(LOCK, worse, 0.05, "fail").notes == (
        "the lock was made with jax 0.10.2, libtpu -, and this is jax 0.12.0, libtpu 0.1: "
        "that alone may be the reason",
    )


def test_equal_blocks_are_one_row_and_json_has_them_all():
    lock = dataclasses.replace(LOCK, arrays={f"params/block_{i}/up": UP for i in range(12)})
    whole = dataclasses.replace(UP, spec=())
    report = compared(
        lock, dataclasses.replace(lock, arrays=dict.fromkeys(lock.arrays, whole)), 0, "fail"
    )
    assert isinstance(report, LockReport)
    lines = str(report).splitlines()
    assert lines[0] == "not as locked: 12 changed"
    assert lines[3].split()[:2] == ["params/block_*/up", "12"]
    data = json.loads(report.to_json())
    assert not data["ok"]
    assert len(data["differences"]) == 12
    assert data["differences"][0] == {
        "where": "params/block_0/up",
        "what": "spec was P('data', 'model'), is now P()",
        "effect": "changed",
    }


def group(*layers, axes="data"):
    return CollectiveGroup(layers, "backward", "all-reduce", axes)


def test_collectives_that_the_compiler_merges_otherwise_are_one_difference():
    def of(*counts):
        return dataclasses.replace(LOCK, collectives=dict(counts))

    def changes(lock, step):
        found = compared(lock, step, 0.05, "fail").differences
        return [(each.where, each.what, each.effect) for each in found]

    before = of((group("a/x", "a/y", "b", "optimizer"), CollectiveCount(1, 4096)))
    less = of((group("a/x", "a/y"), CollectiveCount(1, 3072)))
    text = "1 all-reduce over 'data' (4.0 KiB) in the backward pass for a/x + a/y + b + optimizer"
    assert changes(before, less) == [
        ("a/{x, y}", f"{text} became 1 (3.0 KiB), merged otherwise", "changed")
    ]
    more = of((group("a/x"), CollectiveCount(2, 3072)))
    assert changes(before, more) == [
        ("a/x", f"{text} became 2 (3.0 KiB), merged otherwise", "worse")
    ]
    unknown = of((group("a/x"), CollectiveCount(1, 3072, unknown_times=1)))
    assert [effect for *_, effect in changes(before, unknown)] == ["worse"]
    parts = of(
        (group("b"), CollectiveCount(1, 1024)),
        (group("a/x", "a/y"), CollectiveCount(1, 3072)),
    )
    assert changes(before, parts) == [
        ("b", "1 all-reduce over 'data' (1.0 KiB) is new in the backward pass", "worse"),
        ("a/{x, y}", f"{text} became 1 (3.0 KiB), merged otherwise", "changed"),
    ]
    # Neither of these is the same one.
    for other in (group("c", "optimizer"), group("a/x", axes="model")):
        effects = [effect for *_, effect in changes(before, of((other, CollectiveCount(1, 8))))]
        assert effects == ["worse", "better"]


def test_what_is_worse_and_moves_most_comes_first_and_the_sum_last():
    lock = dataclasses.replace(LOCK, collectives={group("gone"): CollectiveCount(1, 10**6)})
    step = dataclasses.replace(
        LOCK, collectives={group(str(n)): CollectiveCount(1, n) for n in (1, 300, 20)}
    )
    report = compared(lock, step, 0.05, "fail")
    assert [each.where for each in report.differences] == ["300", "20", "1", "gone"]
    assert report.notes == ("all collectives together: 1 (976.6 KiB) → 3 (321 B)",)
    assert str(report).endswith(report.notes[0])


def test_it_unfolds_to_where_it_differs_with_what_is_bad():
    step = dataclasses.replace(
        LOCK,
        arrays={
            PATH: dataclasses.replace(UP, spec=("data",)),
            "params/block_1/up": UP,
        },
        memory={**LOCK.memory, "temporaries": 6 * MIB},
    )
    report = compared(LOCK, step, 0.05, "pass")
    tree = report.tree(collapse=False)
    nodes = {node.path: node for node in tree.walk()}
    assert tree.figures[0].value == len(report.differences) == 3
    assert tree.ok is False
    assert (nodes[PATH].ok, nodes["params"].ok, nodes["temporaries"].ok) == (False, False, True)
    assert nodes[PATH].details == ("spec was P('data', 'model'), is now P('data')",)
    assert compared(LOCK, LOCK, 0.05, "fail").tree().children == ()
