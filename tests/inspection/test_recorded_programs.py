"""The collectives of programs of CPUs, GPUs and TPUs, recorded by ``record_programs.py``.

What they move is worked out by hand from the functions in that script.
"""

import collections
import pathlib
import types

import pytest

from penzai_shard.errors import ProgramError
from penzai_shard.inspection.attribution import read_collectives
from penzai_shard.inspection.hlo import Program
from penzai_shard.inspection.liveness import read_peak
from tests.refusals import problem_paths, problems_of

PROGRAMS = pathlib.Path(__file__).parent / "programs"
# What a device has of the array that the functions take: bfloat16, which CPUs widen.
ELEMENTS = 16 * 256
ITEM_BYTES = {"cpu": 4, "gpu": 2, "tpu": 2}
MOVES = ["summed_everywhere", "summed", "gathered", "scattered", "exchanged", "rotated", "shifted"]
SCOPES = [*MOVES, "mlp", "optimizer"]


def owner(name):
    """Layers are the scopes that ``record_programs.py`` opens itself."""
    return next((scope for scope in SCOPES if f"/{scope}" in name), None)


def phase(name):
    if "/optimizer" in name:
        return "optimizer"
    return "backward" if "transpose(" in name else "forward" if "jvp(" in name else None


STEP = types.SimpleNamespace(
    mesh=types.SimpleNamespace(shape={"data": 4, "model": 2}),
    layers=types.SimpleNamespace(owner=owner, phase=phase, holders=lambda path: ()),
    arguments=(),
    results=(),
    next_arguments={},
)


def read_text(name):
    return (PROGRAMS / f"{name}.hlo").read_text()


def read(text):
    return read_collectives(Program.read(text), STEP)


# Kind, mesh axes, elements, times, whether it may run less often.
FACTS = {
    "one_of_each": [
        ("all-reduce", "data", ELEMENTS, 1, False),
        ("all-reduce", "data+model", ELEMENTS + 256, 1, False),
        ("all-gather", "model", 2 * ELEMENTS, 1, False),
        ("reduce-scatter", "data", 4 * ELEMENTS, 1, False),
        ("all-to-all", "data", ELEMENTS, 1, False),
        ("collective-permute", "data", ELEMENTS, 1, False),
        ("collective-permute", "data (4 of 8 devices send)", ELEMENTS, 1, False),
    ],
    "parts_of_axes": [
        ("all-reduce", "data (in 2 groups of 2, neighbours)", ELEMENTS, 1, False),
        ("all-reduce", "data (in 2 groups of 2, 2 apart)", ELEMENTS, 1, False),
        ("all-reduce", "data (in 2 groups of 2, neighbours)+model", ELEMENTS, 1, False),
    ],
    "loops": [
        ("all-reduce", "data", ELEMENTS, 5 * 3, False),
        ("all-reduce", "model", ELEMENTS, 5, False),
        # As long as the sum is large.
        ("collective-permute", "data", ELEMENTS, None, False),
        ("all-reduce", "model", 1, None, False),
        # Two branches.
        ("all-reduce", "model", ELEMENTS, 7, True),
        ("all-reduce", "data+model", ELEMENTS, 1, True),
    ],
}


# Compilers for TPUs do not write how often loops run.
@pytest.mark.parametrize("hidden", ["", "known_trip_count"])
@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("platform", ITEM_BYTES)
def test_read_collectives(platform, name, hidden):
    text = read_text(f"{platform}/{name}")
    collectives = read(text.replace(hidden, "hidden") if hidden else text)
    assert collections.Counter(
        (one.kind, one.axes_text, one.payload_bytes, one.times, one.is_upper_bound)
        for one in collectives
    ) == collections.Counter(
        (kind, axes, elements * ITEM_BYTES[platform], *times)
        for kind, axes, elements, *times in FACTS[name]
    )
    if name == "one_of_each":
        # Two of the arrays are added at once; for a GPU as one, and without a name.
        parts = [part for one in collectives for part in one.parts]
        assert len(parts) == (7 if platform == "gpu" else 8)
        assert {part.layers for part in parts} == {(scope,) for scope in MOVES}


# How many weights are gathered backwards, of two in each of two layers, and how many sums of
# activations there are. Where the loop is written out, the last weight is still there, for TPUs all
# of them. With remat, the first weight of each layer is gathered to compute again, and once more
# for the gradient; for TPUs once for both. The first layer's input needs no gradient, but a loop
# does not know which is the first.
BACKWARD = {
    "step": ({"cpu": 3, "gpu": 3, "tpu": 0}, 1),
    "step_in_a_loop": (dict.fromkeys(ITEM_BYTES, 4), 2),
    "step_with_remat": ({"cpu": 6, "gpu": 6, "tpu": 4}, 2),
}


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("platform", ITEM_BYTES)
def test_read_collectives_of_a_step(platform, name):
    # Each device has a part of 16 x 256 of the activations, and half of a weight of 256 x 512.
    size = ELEMENTS * ITEM_BYTES[platform]
    weight = 16 * size
    gathers, sums = BACKWARD[name]
    expected = {
        ("all-gather", "data", "forward"): 4 * weight,
        ("all-gather", "data", "backward"): gathers[platform] * weight,
        ("all-reduce", "model", "forward"): 2 * size,
        ("all-reduce", "model", "backward"): sums * size,
        ("reduce-scatter", "data", "backward"): 4 * weight,
    }
    collectives = read(read_text(f"{platform}/{name}"))
    found, rest = collections.Counter(), set()
    for one in collectives:
        for part in one.parts:
            kind = "reduce-scatter" if part.keeps_slice else one.kind
            if part.layers == ("mlp",):
                found[kind, one.axes_text, part.phase] += one.times * part.payload_bytes
            else:
                rest.add((part.layers, part.phase))
    assert found == collections.Counter(expected)
    # The mean of the loss, and the norm of all gradients.
    assert rest == {((), "forward"), (("optimizer",), "optimizer")}
    # Found by the compiler, or an all-reduce of which each device keeps a slice.
    assert any(one.kind == "reduce-scatter" for one in collectives) == (platform != "cpu")


@pytest.mark.parametrize(
    ("before", "after", "paths"),
    [
        ("replica_groups={", "replica_groups=maximal_mesh{", {"psum.16", "psum.17", "pmax.8"}),
        # Less than a sum gives.
        ("%pmax.8 = f32[16,256]", "%pmax.8 = f32[16,128]", {"pmax.8"}),
    ],
)
def test_read_collectives_in_an_unknown_form(before, after, paths):
    text = read_text("cpu/parts_of_axes")
    assert before in text
    assert {*problem_paths(ProgramError, read, text.replace(before, after))} == paths


@pytest.mark.parametrize("text", ["", "HloModule m", read_text("cpu/loops").replace("%", "")])
def test_read_of_no_program(text):
    problems = problems_of(ProgramError, Program.read, text)
    assert "compiled.as_text()" in problems[0].fix


SUM = """ENTRY %e {
  %x = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[8,4]{1,0} all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %h = f32[8,4]{1,0} multiply(%r, %r)
  %d = f32[2,4]{1,0} dynamic-slice(%h, %i, %i), dynamic_slice_sizes={2,4}
  ROOT %t = (f32[2,4]{1,0}, f32[8,4]{1,0}) tuple(%d, %x)
}"""


@pytest.mark.parametrize(
    ("before", "after", "keeps"),
    [
        ("", "", True),
        # As the result, a half of it, in a product, nothing of it.
        ("tuple(%d, %x)", "tuple(%d, %h)", False),
        ("f32[2,4]{1,0} dynamic", "f32[4,4]{1,0} dynamic", False),
        ("multiply(%r, %r)", "dot(%r, %r)", False),
        ("multiply(%r, %r)", "multiply(%x, %x)", False),
        # Asked for by name.
        ("to_apply=%add", 'to_apply=%add, metadata={op_name="jit(f)/psum"}', False),
    ],
)
def test_read_collectives_keeps_slice(before, after, keeps):
    assert before in SUM
    (one,) = read(SUM.replace(before, after))
    assert [part.keeps_slice for part in one.parts] == [keeps]


# What the compilers say that temporaries take.
TEMPORARIES = {
    "cpu/step": 1_851_600,
    "cpu/step_in_a_loop": 1_483_280,
    "cpu/step_with_remat": 1_442_304,
    "gpu/step": 1_050_936,
    "gpu/step_in_a_loop": 709_192,
    "gpu/step_with_remat": 693_048,
}


@pytest.mark.parametrize("name", TEMPORARIES)
def test_read_peak_of_a_step(name):
    found = read_peak(Program.read(read_text(name)), TEMPORARIES[name])
    explained = sum(value.bytes for value in found)
    assert abs(explained - TEMPORARIES[name]) < 0.2 * TEMPORARIES[name]
    largest = sorted(found, key=lambda value: -value.bytes)[:4]
    assert {owner(value.op_name) for value in largest} == {"mlp"}


def test_read_peak_of_a_step_for_a_tpu():
    # All that is not tiny is in the small memory, and is no temporary.
    assert read_peak(Program.read(read_text("tpu/step")), 419_328) == []


PLAIN = """ENTRY %e {
  %p = f32[256]{0} parameter(0)
  %a = f32[256]{0} exponential(%p)
  %v = f32[256]{0} bitcast(%a)
  %b = f32[128]{0} slice(%v), slice={[0:128]}
  %s = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%p)
  %c = f32[256]{0} copy-done(%s)
  %d = f32[128]{0} slice(%c), slice={[0:128]}
  ROOT %r = f32[512]{0} concatenate(%b, %d, %p), dimensions={0}
}"""


def test_read_peak_when_values_end():
    # The copy of p and two slices: exp(p) has ended; p and the result are no temporaries.
    found = read_peak(Program.read(PLAIN), 2048)
    assert sorted(value.bytes for value in found) == [512, 512, 1024]


@pytest.mark.parametrize("figure", [1023, 4097, 0])
def test_read_peak_that_explains_nothing(figure):
    assert read_peak(Program.read(PLAIN), figure) == []
