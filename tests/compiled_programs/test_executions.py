"""How often each computation of a program runs; loops of every form."""

import pytest

from penzai_shard.compiled_programs import Module
from penzai_shard.compiled_programs.executions import Executions, executions

LOOP = """
HloModule jit_step

added {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT sum = s32[] add(a, b)
}

counted {
  p.1 = s32[] parameter(0)
  one.1 = s32[] constant(1)
  ROOT next.1 = s32[] add(p.1, one.1)
}

body {
  p = (s32[], s32[], f32[4]{0}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  limit = s32[] get-tuple-element(p), index=1
  x = f32[4]{0} get-tuple-element(p), index=2
  step = s32[] constant(1)
  next = s32[] add(i, step)
  y = f32[4]{0} negate(x)
  ROOT carry = (s32[], s32[], f32[4]{0}) tuple(next, limit, y)
}

condition {
  p.2 = (s32[], s32[], f32[4]{0}) parameter(0)
  i.2 = s32[] get-tuple-element(p.2), index=0
  limit.2 = s32[] get-tuple-element(p.2), index=1
  ROOT go_on = pred[] compare(i.2, limit.2), direction=LT
}

ENTRY main {
  x.3 = f32[4]{0} parameter(0)
  n = s32[] parameter(1)
  first = s32[] constant(0)
  last = s32[] constant(10)
  begin = (s32[], s32[], f32[4]{0}) tuple(first, last, x.3)
  loop = (s32[], s32[], f32[4]{0}) while(begin), condition=condition, body=body
  ROOT z = f32[4]{0} get-tuple-element(loop), index=2
}
"""


def times(*changes):
    text = LOOP
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return executions(Module.from_text(text))


@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        ((), 10),
        ((("direction=LT", "direction=LE"),), 11),
        ((("compare(i.2, limit.2), direction=LT", "compare(limit.2, i.2), direction=GT"),), 10),
        ((("compare(i.2, limit.2), direction=LT", "compare(limit.2, i.2), direction=GE"),), 11),
        ((("step = s32[] constant(1)", "step = s32[] constant(3)"),), 4),
        ((("first = s32[] constant(0)", "first = s32[] constant(4)"),), 6),
        ((("first = s32[] constant(0)", "first = s32[] constant(-4)"),), 14),
        ((("first = s32[] constant(0)", "first = s32[] constant(12)"),), 0),
        ((("next = s32[] add(i, step)", "next = s32[] add(step, i)"),), 10),
        # Copies and fusions on the way, and a limit that is written in the condition.
        ((("add(i, step)", "fusion(i), kind=kLoop, calls=counted"),), 10),
        ((("limit.2 = s32[] get-tuple-element(p.2), index=1", "limit.2 = s32[] constant(7)"),), 7),
        (
            (
                ("tuple(first, last, x.3)", "tuple(first, copied, x.3)"),
                (
                    "last = s32[] constant(10)",
                    "last = s32[] constant(10)\n  copied = s32[] copy(last)",
                ),
            ),
            10,
        ),
        # What the compiler writes counts.
        ((("body=body", 'body=body, backend_config={"known_trip_count":{"n":"5"}}'),), 5),
    ],
)
def test_a_loop_that_counts_says_how_often_it_runs(changes, turns):
    found = times(*changes)
    # The condition is asked once more.
    assert (found["body"], found["condition"]) == (Executions(turns), Executions(turns + 1))


@pytest.mark.parametrize(
    "changes",
    [
        # A limit that is not a constant, or changes.
        (("tuple(first, last, x.3)", "tuple(first, n, x.3)"),),
        (("tuple(next, limit, y)", "tuple(next, next, y)"),),
        (("tuple(next, limit, y)", "tuple(next, step, y)"),),
        # A sum over devices.
        (
            (
                "last = s32[] constant(10)",
                "ten = s32[] constant(10)\n  last = s32[] all-reduce(ten),"
                " replica_groups={{0,1}}, to_apply=added",
            ),
        ),
        # A beginning that is not a constant.
        (("tuple(first, last, x.3)", "tuple(n, last, x.3)"),),
        # Another comparison, one with itself, one of others.
        (("direction=LT", "direction=NE"),),
        (("direction=LT", "direction=GT"),),
        (("compare(i.2, limit.2)", "compare(i.2, i.2)"),),
        (("compare(i.2, limit.2)", "compare(limit.2, i.2)"),),
        # A counter that goes down, stays, changes by what it likes, or by itself.
        (("step = s32[] constant(1)", "step = s32[] constant(-1)"),),
        (("step = s32[] constant(1)", "step = s32[] constant(0)"),),
        (("add(i, step)", "add(i, limit)"), ("tuple(first, last, x.3)", "tuple(first, n, x.3)")),
        (("add(i, step)", "add(i, i)"),),
        (("add(i, step)", "multiply(i, step)"),),
        (("add(i, step)", "add(limit, step)"),),
        # A condition of two.
        (
            ("ROOT go_on = pred[] compare", "less = pred[] compare"),
            ("direction=LT", "direction=LT\n  ROOT go_on = pred[] and(less, less)"),
        ),
    ],
)
def test_any_other_loop_runs_an_unknown_number_of_times(changes):
    found = times(*changes)
    assert (found["body"], found["condition"]) == (Executions(None), Executions(None))


def test_a_computation_runs_as_often_as_all_its_callers_together():
    found = executions(
        Module.from_text("""
HloModule jit_step

never { ROOT c = f32[] parameter(0) }

inner {
  ROOT a = f32[] parameter(0)
}

outer {
  b = f32[] parameter(0)
  once = f32[] call(b), to_apply=inner
  ROOT again = f32[] call(once), to_apply=inner
}

ENTRY main {
  x = f32[] parameter(0)
  p = pred[] parameter(1)
  y = f32[] call(x), to_apply=outer
  z = f32[] call(y), to_apply=outer
  w = f32[] call(z), to_apply=inner
  ROOT v = f32[] conditional(p, w, w), true_computation=inner, false_computation=outer
}
""")
    )
    assert found == {
        "main": Executions(1),
        "outer": Executions(3, at_most=True),
        "inner": Executions(2 * 3 + 1 + 1, at_most=True),
    }
