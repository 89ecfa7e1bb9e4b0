"""The collectives of programs of CPUs, TPUs and GPUs as ``record_programs.py`` made them."""

import collections
import pathlib

import pytest

from benchmarks import compiled_collectives as oracle
from penzai_shard.compiled_programs import (
    Module,
    read_collectives,
    unknown_communication,
)

PROGRAMS = pathlib.Path(__file__).parent / "programs"
NAMES = [str(path.relative_to(PROGRAMS)).removesuffix(".hlo") for path in PROGRAMS.rglob("*.hlo")]
PLATFORMS = ("cpu", "cpu_jax_0_12", "gpu", "tpu")
MESH = {"data": 4, "model": 2}


def test_all_recorded_programs_are_there():
    assert len(NAMES) == len(PLATFORMS) * 5 + 3


def text_of(name):
    return (PROGRAMS / f"{name}.hlo").read_text(encoding="utf-8")


def read(name):
    return read_collectives(Module.from_text(text_of(name)), 8)


def figures(name):
    """What each collective moves and how often, in no order."""
    return sorted(
        (one.kind, one.axes(MESH).text, one.payload_bytes, one.times or 0, one.at_most)
        for one in read(name)
    )


def array_bytes(platform):
    """An array of 16 x 256 on one device: bfloat16, which the compiler for CPUs widens."""
    return 16 * 256 * (4 if platform.startswith("cpu") else 2)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_kind_is_read_with_its_mesh_axes_and_bytes(platform):
    size = array_bytes(platform)
    assert figures(f"{platform}/one_of_each") == [
        ("all-gather", "model", 2 * size, 1, False),
        ("all-reduce", "data", size, 1, False),
        ("all-reduce", "data x model", size + size // 16, 1, False),
        ("all-to-all", "data", size, 1, False),
        ("collective-permute", "data", size, 1, False),
        ("collective-permute", "data (4 of 8 devices send)", size, 1, False),
        ("reduce-scatter", "data", 4 * size, 1, False),
    ]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_names_say_where_collectives_come_from(platform):
    scopes = {
        name.split("/")[2] for one in read(f"{platform}/one_of_each") for name in one.op_names
    }
    # Two arrays that are summed at once lose their name when they are joined for a GPU.
    unnamed = {"summed_everywhere"} if platform == "gpu" else set()
    assert (
        scopes
        == {
            "summed",
            "summed_everywhere",
            "gathered",
            "scattered",
            "exchanged",
            "rotated",
            "shifted",
        }
        - unnamed
    )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_groups_over_parts_of_mesh_axes_are_named_as_parts(platform):
    size = array_bytes(platform)
    assert figures(f"{platform}/parts_of_axes") == [
        ("all-reduce", "data (2 of 4, 2 apart)", size, 1, False),
        ("all-reduce", "data (2 of 4, neighbours)", size, 1, False),
        ("all-reduce", "data (2 of 4, neighbours) x model", size, 1, False),
    ]
    assert not any(one.axes(MESH).is_whole for one in read(f"{platform}/parts_of_axes"))


@pytest.mark.parametrize("without", ["", "known_trip_count"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_loops_multiply_and_branches_are_marked(platform, without):
    # Also read off the loops themselves, where the compiler does not write their number of turns.
    text = text_of(f"{platform}/loops")
    module = Module.from_text(text.replace(without, "unknown") if without else text)
    size = array_bytes(platform)
    found = {
        (one.kind, one.axes(MESH).text, one.payload_bytes, one.times, one.at_most)
        for one in read_collectives(module, 8)
    }
    assert found == {
        ("all-reduce", "data", size, 3 * 5, False),
        ("all-reduce", "model", size, 5, False),
        ("collective-permute", "data", size, None, False),
        ("all-reduce", "model", size // (16 * 256), None, False),
        ("all-reduce", "model", size, 7, True),
        ("all-reduce", "data x model", size, 1, True),
    }


def totals(name):
    """Executions of each kind over each mesh axis, and bytes of all of them."""
    times, sizes = collections.Counter(), collections.Counter()
    for kind, text, payload, executed, _ in figures(name):
        times[kind, text] += executed
        sizes[kind, text] += executed * payload
    return {key: (times[key], sizes[key]) for key in times}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_weights_are_gathered_and_gradients_reduced_in_every_turn_of_a_loop(platform):
    # Each device has half of a weight of 256 x 512, gathered over data: forward and backward of two
    # layers of two weights.
    size = array_bytes(platform)
    weight = 16 * size
    found = totals(f"{platform}/step_in_a_loop")
    gathers, gathered = found["all-gather", "data"]
    assert gathered == 2 * 2 * 2 * weight
    assert gathers == (4 if platform == "gpu" else 8)  # Both weights of a layer at once, or each.
    sums, summed = found["all-reduce", "model"]
    scattered = "all-reduce" if platform.startswith("cpu") else "reduce-scatter"
    if platform.startswith("cpu"):
        assert summed - 2 * 4 == 2 * 2 * size
        assert found["all-reduce", "data"][1] == 2 * 2 * weight + 3 * 4
    else:
        assert (sums, summed) == (4, 2 * 2 * size)
        assert found[scattered, "data"] == (2, 2 * 2 * weight)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_weights_are_gathered_and_gradients_reduced_once_for_each_layer(platform):
    size = array_bytes(platform)
    weight = 16 * size
    found = totals(f"{platform}/step")
    # The compiler for TPUs keeps what it gathered; the others gather again, but for the last.
    assert found["all-gather", "data"][1] == (4 if platform == "tpu" else 7) * weight
    if platform.startswith("cpu"):
        assert found["all-reduce", "data"][1] == 4 * weight + 3 * 4
    else:
        assert found["reduce-scatter", "data"] == (1, 4 * weight)
        assert found["all-reduce", "model"] == (3, 3 * size)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("cpu")])
def test_a_reader_that_shares_no_code_finds_the_same(name):
    other = oracle.read_collectives(text_of(name), MESH, unknown_trip_count=0)
    expected = collections.Counter(
        (one.kind, one.mesh_axes, one.payload_bytes, one.times, one.name) for one in other
    )
    found = collections.Counter()
    for one in read(name):
        over = one.axes(MESH)
        whole = over.is_whole or one.kind == "collective-permute"
        if one.times is not None:
            named = over.mesh_axes if whole else None
            found[one.kind, named, one.payload_bytes, one.times, one.name] += 1
    assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_in_them_may_communicate(name):
    assert unknown_communication(Module.from_text(text_of(name))) == ()


CALLING = """HloModule m

ENTRY e {{
  p = f32[2]{{0}} parameter(0)
  q = f32[2]{{0}} parameter(1)
  ROOT c = f32[4]{{0}} custom-call(p, q), custom_call_target="{target}"
}}
"""


@pytest.mark.parametrize(("target", "known"), [("ConcatBitcast", True), ("ConcatBits", False)])
def test_parts_that_a_compiler_for_tpus_prefetches_are_put_together_on_one_device(target, known):
    found = unknown_communication(Module.from_text(CALLING.format(target=target)))
    assert (found == ()) is known
