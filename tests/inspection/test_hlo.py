"""How often parts of a program run: the right number, or None; and groups of devices."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penzai_shard.inspection.device_groups import mesh_axes, read_groups
from penzai_shard.inspection.hlo import Program

LOOP = """\
%body {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] get-tuple-element(%p), index=1
  %step = s32[] constant(1)
  %next = s32[] add(%i, %step)
  ROOT %carry = (s32[], s32[]) tuple(%next, %limit)
}
%condition {
  %p.2 = (s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %limit.2 = s32[] get-tuple-element(%p.2), index=1
  ROOT %go_on = pred[] compare(%i.2, %limit.2), direction=LT
}
ENTRY %main {
  %n = s32[] parameter(0)
  %first = s32[] constant(0)
  %last = s32[] constant(10)
  %begin = (s32[], s32[]) tuple(%first, %last)
  ROOT %loop = (s32[], s32[]) while(%begin), condition=%condition, body=%body
}
"""
LESS = "compare(%i.2, %limit.2), direction=LT"


def times(changes):
    text = LOOP
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return Program.read(text).times


@pytest.mark.parametrize(
    ("turns", "changes"),
    [
        (10, {}),
        (7, {"get-tuple-element(%p.2), index=1": "constant(7)"}),
        (10, {"tuple(%first": "tuple(%copied", "%n =": "%copied = s32[] copy(%first)\n  %n ="}),
        # What the compiler writes counts.
        (5, {"body=%body": 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'}),
        # A limit or a start that is no constant, or changes.
        (None, {"tuple(%first, %last": "tuple(%first, %n"}),
        (None, {"tuple(%first, %last": "tuple(%n, %last"}),
        (None, {"tuple(%next, %limit": "tuple(%next, %next"}),
        (None, {"tuple(%first, %last": "tuple(%first, %n", "%next, %limit": "%next, %step"}),
        (None, {"%last = s32[] constant(10)": "%last = s32[] add(%n, %first)"}),
        # Another comparison, one with itself, one of two others, one with the constant on the left.
        (None, {LESS: "compare(%i.2, %i.2), direction=LT"}),
        (None, {LESS: "compare(%limit.2, %i.2), direction=GT"}),
        (None, {"ROOT %go_on = pred[] compare": "%a = pred[] compare",
                "direction=LT": "direction=LT\n  ROOT %go_on = pred[] and(%a, %a)"}),
        # A counter that changes by what it likes.
        (None, {"add(%i, %step)": "add(%i, %i)"}),
        (None, {"add(%i, %step)": "add(%i, %limit)", "tuple(%first, %last": "tuple(%first, %n"}),
        (None, {"add(%i, %step)": "multiply(%i, %step)"}),
        (None, {"add(%i, %step)": "add(%limit, %step)"}),
        # A counter of another type, and another value than the one that is compared.
        (None, {"s32[] constant": "u8[] constant"}),
        (None, {"tuple(%next, %limit)": "tuple(%i, %next)"}),
    ],
)  # fmt: skip
def test_times_of_a_loop(turns, changes):
    found = times(changes)
    # The condition is asked once more.
    once_more = None if turns is None else turns + 1
    assert (found["body"], found["condition"]) == ((turns, False), (once_more, False))


DIRECTIONS = st.sampled_from(["LT", "LE", "GT", "GE", "NE"])


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-2, 2), DIRECTIONS)
def test_times_drawn(first, last, step, direction):
    changes = {
        "first = s32[] constant(0)": f"first = s32[] constant({first})",
        "last = s32[] constant(10)": f"last = s32[] constant({last})",
        "step = s32[] constant(1)": f"step = s32[] constant({step})",
        "direction=LT": f"direction={direction}",
    }
    found, _ = times(changes)["body"]
    assert found == (len(range(first, last)) if (direction, step) == ("LT", 1) else None)


CALLS = """\
%never {
  ROOT %c = f32[] parameter(0)
}
%inner {
  ROOT %a = f32[] parameter(0)
}
%outer {
  %b = f32[] parameter(0)
  %once = f32[] call(%b), to_apply=%inner
  ROOT %again = f32[] call(%once), to_apply=%inner
}
ENTRY %main {
  %x = f32[] parameter(0)
  %p = pred[] parameter(1)
  %y = f32[] call(%x), to_apply=%outer
  %z = f32[] call(%y), to_apply=%inner
  ROOT %v = f32[] conditional(%p, %z, %z), true_computation=%inner, false_computation=%outer
}
"""


def test_times_of_several_callers_and_branches():
    assert Program.read(CALLS).times == {
        "main": (1, False),
        "never": (0, False),
        "outer": (2, True),
        "inner": (2 * 2 + 1 + 1, True),
    }


# Groups of devices

ALL = (tuple(range(8)),)
HALVES = ((0, 4), (1, 5), (2, 6), (3, 7))


@given(st.data())
def test_read_groups_drawn(data):
    """Groups along some axes of a mesh, in all the forms in which compilers write them."""
    names = "abcd"[: data.draw(st.integers(1, 4))]
    sizes = {name: data.draw(st.integers(1, 4)) for name in names}
    order = data.draw(st.permutations(range(len(names))))
    over = order[data.draw(st.integers(0, len(names) - 1)) :]
    ids = np.arange(math.prod(sizes.values())).reshape([*sizes.values()]).transpose(order)
    groups = ids.reshape(-1, math.prod(sizes[names[i]] for i in over)).tolist()

    def text(items):
        return ",".join(map(str, items))

    turned = f"[{text(sizes.values())}]T({text(order)})"
    mesh, turned_mesh = (
        text(f"{names[i]!r}={sizes[names[i]]}" for i in o) for o in (range(len(names)), order)
    )
    axes = f"{{{text(repr(names[i]) for i in over)}}}"
    forms = [
        str(groups).translate(str.maketrans("[]", "{}", " ")),
        f"[{len(groups)},{len(groups[0])}]<={turned}",
        f"mesh[{mesh}] {axes}",
        # The mesh with its axes in another order, in which devices have other numbers.
        f"mesh[{turned_mesh}], device_ids=({turned}) {axes}",
        f"mesh[{turned_mesh}], device_ids=([{ids.size}]<={turned}) {axes}",
        f"mesh[{turned_mesh}], device_ids=({text(ids.ravel())}) {axes}",
    ]
    expected = set(map(tuple, groups))
    assert all({*read_groups(form, ids.size)} == expected for form in forms)
    found, _ = mesh_axes(tuple(expected), tuple(sizes.items()))
    assert found == tuple(name for name in names if name in axes and sizes[name] > 1)


GROUPS = {
    "{}": ALL,
    "{{0}}": ALL,
    "[4,2]<=[8]": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['a'=8] {'a':(1)2}": HALVES,
    "mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=8] {'a':(4)2,'a':(1)2}": ((0, 4, 1, 5), (2, 6, 3, 7)),
}
UNKNOWN = """ all {0,1} {{0,1} {{0,1},{2}} {{0,8}} [4,2] [4,2]<=[9] [2,2,2]<=[8] [4,2]<=[2,4]T(1,1)
    mesh['a'=8] mesh['a'=8]_{'b'} mesh['a'=16]_{'a'} mesh['a'=8]_{'a':(3)2}
    mesh['a'=8],_device_ids=(somehow)_{'a'}"""


@pytest.mark.parametrize("text", [*GROUPS, *UNKNOWN.split()])
def test_read_groups(text):
    assert read_groups(text.replace("_", " "), 8) == GROUPS.get(text)


@pytest.mark.parametrize(
    ("groups", "axes", "text"),
    [
        (((6, 2, 0, 4), (1, 3, 5, 7)), ("data",), "data"),
        (tuple((i,) for i in range(8)), (), "no mesh axis"),
        (((0, 2), (4, 6), (1, 3), (5, 7)), ("data",), "data (in 2 groups of 2, neighbours)"),
        (HALVES, ("data",), "data (in 2 groups of 2, 2 apart)"),
        (
            ((0, 1, 2, 3), (4, 5, 6, 7)),
            ("data", "model"),
            "data (in 2 groups of 2, neighbours)+model",
        ),
        (((0, 3), (1, 2), (4, 7), (5, 6)), None, "devices that are not along mesh axes"),
        (((0, 6), (1, 4)), None, "devices that are not along mesh axes"),
        # Pairs of a permute.
        ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("data",), "data"),
        ("{{0,2},{2,4},{4,6}}", ("data",), "data (3 of 8 devices send)"),
        ("{{0,1},{1,2},{2,0}}", ("data", "model"), "data+model (3 of 8 devices send)"),
        ("{{0,0},{1,1}}", (), "no mesh axis"),
    ],
)
def test_mesh_axes(groups, axes, text):
    are_pairs = isinstance(groups, str)
    groups = read_groups(groups, 8) if are_pairs else groups
    assert mesh_axes(groups, (("data", 4), ("model", 2)), are_pairs=are_pairs) == (axes, text)
