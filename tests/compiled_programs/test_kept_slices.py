"""All-reduces that are reduce-scatters: found if each device keeps its slice, and only then."""

import pytest

from penzai_shard.compiled_programs import Module, kept_slice_bytes, read_collectives

HEADER = """HloModule m, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

sliced {
  p = f32[8,4]{1,0} parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  n = f32[8,4]{1,0} negate(p)
  ROOT d = f32[2,4]{1,0} dynamic-slice(n, i, z), dynamic_slice_sizes={2,4}
}

doubled {
  p = f32[8,4]{1,0} parameter(0)
  ROOT d = f32[8,4]{1,0} add(p, p)
}

both {
  p = f32[8,4]{1,0} parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  d = f32[2,4]{1,0} dynamic-slice(p, i, z), dynamic_slice_sizes={2,4}
  ROOT t = (f32[2,4]{1,0}, f32[8,4]{1,0}) tuple(d, p)
}

"""
REDUCED = "all-reduce(x), replica_groups=[1,4]<=[4], use_global_device_ids=true, to_apply=add"
ENTRY = f"""ENTRY e {{
  x = f32[8,4]{{1,0}} parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  r = f32[8,4]{{1,0}} {REDUCED}, channel_id=1
"""
WHOLE = 8 * 4 * 4


def slice_of(name, sizes="2,4"):
    return f"f32[{sizes}]{{1,0}} dynamic-slice({name}, i, z), dynamic_slice_sizes={{{sizes}}}"


def in_entry(*lines):
    return HEADER + ENTRY + "".join(f"  {line}\n" for line in lines) + "}\n"


KEPT = {
    "at once": [f"ROOT d = {slice_of('r')}"],
    "twice": [
        f"d = {slice_of('r')}",
        f"e2 = {slice_of('r')}",
        "ROOT s = f32[2,4]{1,0} add(d, e2)",
    ],
    "after it was scaled": [
        "h = f32[8,4]{1,0} multiply(r, r)",
        "c = f32[8,4]{1,0} copy(h)",
        f"ROOT d = {slice_of('c')}",
    ],
    "in a fusion": ["ROOT f = f32[2,4]{1,0} fusion(r, i), kind=kLoop, calls=sliced"],
    "after a fusion": [
        "f = f32[8,4]{1,0} fusion(r), kind=kLoop, calls=doubled",
        f"ROOT d = {slice_of('f')}",
    ],
    "of both that a fusion gives": [
        "f = (f32[2,4]{1,0}, f32[8,4]{1,0}) fusion(r, i), kind=kLoop, calls=both",
        "g = f32[2,4]{1,0} get-tuple-element(f), index=0",
        "h = f32[8,4]{1,0} get-tuple-element(f), index=1",
        f"d = {slice_of('h')}",
        "ROOT s = f32[2,4]{1,0} add(d, g)",
    ],
}
USED_WHOLE = {
    "as the result": ["ROOT c = f32[8,4]{1,0} copy(r)"],
    "and its slice": [
        f"d = {slice_of('r')}",
        "ROOT t = (f32[2,4]{1,0}, f32[8,4]{1,0}) tuple(d, r)",
    ],
    "a half of it": [f"ROOT d = {slice_of('r', '4,4')}"],
    "nothing of it": ["ROOT d = f32[8,4]{1,0} copy(x)"],
    "in a product": [
        "m = f32[8,8]{1,0} dot(r, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "ROOT d = f32[2,4]{1,0} dynamic-slice(m, i, z), dynamic_slice_sizes={2,4}",
    ],
    "given out of a fusion beside its slice": [
        "f = (f32[2,4]{1,0}, f32[8,4]{1,0}) fusion(r, i), kind=kLoop, calls=both",
        "g = f32[8,4]{1,0} get-tuple-element(f), index=1",
        "ROOT c = f32[8,4]{1,0} copy(g)",
    ],
}


def kept(text):
    module = Module.from_text(text)
    (operation,) = read_collectives(module, 4)
    return kept_slice_bytes(module, operation)


@pytest.mark.parametrize("name", KEPT)
def test_what_each_device_slices_is_a_reduce_scatter(name):
    assert kept(in_entry(*KEPT[name])) == WHOLE


@pytest.mark.parametrize("name", USED_WHOLE)
def test_what_is_used_whole_is_none(name):
    assert kept(in_entry(*USED_WHOLE[name])) == 0


def test_of_several_arrays_those_count_that_are_sliced():
    text = in_entry(*KEPT["at once"])
    pair = f"(f32[8,4]{{1,0}}, f32[8,4]{{1,0}}) {REDUCED.replace('(x)', '(x, x)')}, channel_id=1"
    text = text.replace(
        f"r = f32[8,4]{{1,0}} {REDUCED}, channel_id=1",
        f"p = {pair}\n  r = f32[8,4]{{1,0}} get-tuple-element(p), index=0\n"
        "  q = f32[8,4]{1,0} get-tuple-element(p), index=1",
    ).replace("ROOT d = ", "d = ")
    text = (
        text.rstrip().removesuffix("}")
        + "  ROOT t = (f32[2,4]{1,0}, f32[8,4]{1,0}) tuple(d, q)\n}\n"
    )
    assert kept(text) == WHOLE


def test_collectives_of_other_kinds_keep_no_slice():
    text = in_entry(*KEPT["at once"]).replace(
        f"{REDUCED}, channel_id=1",
        "all-to-all(x), replica_groups=[1,4]<=[4], dimensions={0}, channel_id=1",
    )
    assert kept(text) == 0
