"""Groups of devices in every form that programs write, and the mesh axes that they go over."""

import pytest

from penzai_shard.compiled_programs.device_groups import (
    mesh_axes_of,
    mesh_axes_of_pairs,
    read_groups,
    read_pairs,
)

MESH = {"data": 4, "model": 2}
ALONG_DATA = ((0, 2, 4, 6), (1, 3, 5, 7))
ALONG_MODEL = ((0, 1), (2, 3), (4, 5), (6, 7))
ALL = (tuple(range(8)),)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ALONG_DATA),
        ("{}", ALL),
        ("[4,2]<=[8]", ALONG_MODEL),
        ("[2,4]<=[4,2]T(1,0)", ALONG_DATA),
        ("[1,8]<=[8]", ALL),
        ("[8,1]<=[8]", tuple((i,) for i in range(8))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ALONG_DATA),
        ("mesh[a=4,b=2] {b}", ALONG_MODEL),
        ("mesh['a'=1,'b'=4,'c'=2] {'a','b','c'}", ALL),
        ("mesh['a'=8] {'a':(4)2}", ALONG_MODEL),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([8]<=[4,2]T(1,0)) {'b'}", ALONG_DATA),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ALONG_DATA),
        ("mesh['a'=4,'b'=2] {}", tuple((i,) for i in range(8))),
    ],
)
def test_each_form_of_groups_is_read(text, groups):
    assert read_groups(text, 8) == groups


@pytest.mark.parametrize(
    "text",
    [
        "",
        "all",
        "{0,1}",
        "{{0,1}",
        "{{0,1},{1,2}}",
        "{{0,0}}",
        "{{0,1},{2}}",
        "{{0,8}}",
        "{{0,-1}}",
        "[4,2]",
        "[4,2]<=[9]",
        "[4,2]<=[16]",
        "[2,2,2]<=[8]",
        "[4,2]<=[2,4]T(0)",
        "[4,2]<=[2,4]T(1,1)",
        "[4,2]<=[8] or so",
        "mesh['a'=8]",
        "mesh['a'=8] {'b'}",
        "mesh['a'=4,'a'=2] {'a'}",
        "mesh['a'=16] {'a'}",
        "mesh['a'=8] {'a':(3)2}",
        "mesh['a'=8] {'a':(1)4,'a':(2)2}",
        "mesh['a'=8], device_ids=([4]) {'a'}",
        "mesh['a'=8], device_ids=(somehow) {'a'}",
        "maximal_mesh[device_id=3] {}",
    ],
)
def test_every_other_form_is_an_error(text):
    with pytest.raises(ValueError, match=r"device|group|mesh|parts|order"):
        read_groups(text, 8)


@pytest.mark.parametrize(
    "text", ["", "{0,1}", "{{0,1,2}}", "{{0,1},{0,2}}", "{{0,2},{1,2}}", "{{0,8}}", "[2,2]<=[4]"]
)
def test_pairs_that_cannot_be_read_are_an_error(text):
    with pytest.raises(ValueError, match=r"device|pair"):
        read_pairs(text, 8)


@pytest.mark.parametrize(
    ("groups", "axes", "whole", "text"),
    [
        (ALONG_DATA, ("data",), True, "data"),
        (((6, 2, 0, 4), (1, 3, 5, 7)), ("data",), True, "data"),
        (ALONG_MODEL, ("model",), True, "model"),
        (ALL, ("data", "model"), True, "data x model"),
        (tuple((i,) for i in range(8)), (), True, "no mesh axis"),
        (((0, 2), (4, 6), (1, 3), (5, 7)), ("data",), False, "data (2 of 4, neighbours)"),
        (((0, 4), (2, 6), (1, 5), (3, 7)), ("data",), False, "data (2 of 4, 2 apart)"),
        (
            ((0, 1, 2, 3), (4, 5, 6, 7)),
            ("data", "model"),
            False,
            "data (2 of 4, neighbours) x model",
        ),
        (((0, 1), (2, 3)), ("model",), False, "model, 4 of 8 devices"),
    ],
)
def test_groups_are_named_by_mesh_axes_or_parts_of_them(groups, axes, whole, text):
    found = mesh_axes_of(groups, MESH)
    assert (found.mesh_axes, found.is_whole, found.text) == (axes, whole, text)


@pytest.mark.parametrize(
    "groups", [((0, 3), (1, 2), (4, 7), (5, 6)), ((0, 2), (1, 7), (3, 5), (4, 6)), ((0, 6), (1, 4))]
)
def test_groups_that_go_along_no_mesh_axes_have_none(groups):
    assert mesh_axes_of(groups, MESH) is None


def test_groups_of_4096_devices_are_those_of_their_mesh_axes():
    mesh = {"replica": 4, "data": 128, "model": 8}
    for text, axes in [
        ("[32,128]<=[4,128,8]T(0,2,1)", ("data",)),
        ("[8,512]<=[512,8]T(1,0)", ("replica", "data")),
        ("[512,8]<=[4096]", ("model",)),
    ]:
        found = mesh_axes_of(read_groups(text, 4096), mesh)
        assert (found.mesh_axes, found.is_whole) == (axes, True)


@pytest.mark.parametrize(
    ("pairs", "axes", "whole", "text"),
    [
        ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("data",), True, "data"),
        ("{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", ("model",), True, "model"),
        ("{{0,2},{2,4},{4,6}}", ("data",), False, "data (3 of 8 devices send)"),
        ("{{0,1},{1,2},{2,0}}", ("data", "model"), False, "data x model (3 of 8 devices send)"),
        ("{{0,0},{1,1}}", (), True, "no mesh axis"),
        ("{}", (), True, "no mesh axis"),
    ],
)
def test_permutes_go_along_the_mesh_axes_in_which_pairs_differ(pairs, axes, whole, text):
    found = mesh_axes_of_pairs(read_pairs(pairs, 8), MESH)
    assert (found.mesh_axes, found.is_whole, found.text) == (axes, whole, text)
