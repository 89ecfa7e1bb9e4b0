"""Forms of collectives: fused ones, ones in the background, ones that never run."""

import pytest

from penzai_shard.compiled_programs import Module, ValueFlow, read_collectives
from penzai_shard.errors import ProgramError

SCATTERED = """
HloModule jit_step, num_partitions=8

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

all-reduce-scatter {
  p = f32[16,8]{1,0} parameter(0)
  i = s32[] parameter(1)
  zero = s32[] constant(0)
  r = f32[16,8]{1,0} all-reduce(p), channel_id=1, replica_groups=[2,4]<=[8],
    use_global_device_ids=true, to_apply=add
  c = f32[16,8]{1,0} copy(r)
  ROOT s = f32[4,8]{1,0} dynamic-slice(c, i, zero), dynamic_slice_sizes={4,8}
}

never {
  q = f32[16,8]{1,0} parameter(0)
  ROOT t = f32[16,8]{1,0} all-reduce(q), channel_id=2, replica_groups=[2,4]<=[8],
    use_global_device_ids=true, to_apply=add
}

ENTRY main {
  x = f32[16,8]{1,0} parameter(0)
  n = s32[] parameter(1)
  ROOT f = f32[4,8]{1,0} fusion(x, n), kind=kCustom, calls=all-reduce-scatter,
    metadata={op_name="jit(step)/transpose(jvp(loss))/dot_general"}
}
"""
ROOT = "ROOT s = f32[4,8]{1,0} dynamic-slice(c, i, zero), dynamic_slice_sizes={4,8}"
FUSION = "ROOT f = f32[4,8]{1,0} fusion"
PAIR = "(f32[4,8]{1,0}, f32[16,8]{1,0})"


def test_an_all_reduce_and_its_slice_in_a_fusion_are_a_reduce_scatter():
    (one,) = read_collectives(Module.from_text(SCATTERED), 8)
    assert (one.kind, one.name) == ("reduce-scatter", "r")
    assert [str(array) for array in (*one.operands, *one.results)] == ["f32[16,8]", "f32[4,8]"]
    assert one.op_names == ("jit(step)/transpose(jvp(loss))/dot_general",)


@pytest.mark.parametrize(
    "changes",
    [
        # The whole sum goes on too, or is used otherwise, or another part of it than a share.
        [(ROOT, f"{ROOT[5:]}\n  ROOT u = {PAIR} tuple(s, r)"), (FUSION, f"ROOT f = {PAIR} fusion")],
        [("copy(r)", "negate(r)")],
        [("f32[4,8]{1,0} dynamic", "f32[8,8]{1,0} dynamic"), ("={4,8}", "={8,8}"),
         (FUSION, "ROOT f = f32[8,8]{1,0} fusion")],
        [("f32[4,8]{1,0} dynamic", "f32[2,8]{1,0} dynamic"), ("={4,8}", "={2,8}"),
         (FUSION, "ROOT f = f32[2,8]{1,0} fusion")],
        # The same share on all devices.
        [(ROOT, "ROOT s = f32[4,8]{1,0} slice(c), slice={[0:4],[0:8]}")],
        # Two shares of it.
        [(ROOT, f"{ROOT[5:]}\n  v = f32[4,8]{{1,0}} dynamic-slice(c, zero, zero), "
          "dynamic_slice_sizes={4,8}\n  ROOT u = (f32[4,8]{1,0}, f32[4,8]{1,0}) tuple(s, v)"),
         (FUSION, "ROOT f = (f32[4,8]{1,0}, f32[4,8]{1,0}) fusion")],
        # Not fused: the sum is written whole.
        [("kind=kCustom, calls=", "to_apply="), ("} fusion(", "} call(")],
    ],
)  # fmt: skip
def test_any_other_use_of_the_sum_leaves_it_an_all_reduce(changes):
    text = SCATTERED
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (one,) = read_collectives(Module.from_text(text), 8)
    assert (one.kind, one.results) == ("all-reduce", one.operands)


STARTED = """
HloModule jit_step, num_partitions=8

begin {
  p = f32[4]{0} parameter(0)
  g = f32[32]{0} all-gather(p), GATHERED, frontend_attributes={chain_id="0"}
  ROOT s = (f32[4]{0}, f32[32]{0}, u32[]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}

within {
  p.1 = f32[4]{0} parameter(0)
  q.1 = f32[32]{0} parameter(1)
  g.1 = f32[32]{0} all-gather(p.1), GATHERED, frontend_attributes={chain_id="0"}
  ROOT s.1 = (f32[4]{0}, f32[32]{0}, f32[32]{0}) tuple(p.1, q.1, g.1)
}

end {
  p.2 = f32[4]{0} parameter(0)
  q.2 = f32[32]{0} parameter(1)
  g.2 = f32[32]{0} all-gather(p.2), GATHERED, frontend_attributes={chain_id="0"}
  ROOT s.2 = f32[32]{0} custom-call(p.2, q.2, g.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY main {
  x = f32[4]{0} parameter(0)
  a = (f32[4]{0}, f32[32]{0}, u32[]) fusion(x), kind=kCustom, calls=begin
  a0 = f32[4]{0} get-tuple-element(a), index=0
  a1 = f32[32]{0} get-tuple-element(a), index=1
  b = (f32[4]{0}, f32[32]{0}, f32[32]{0}) fusion(a0, a1), kind=kOutput, calls=within
  b0 = f32[4]{0} get-tuple-element(b), index=0
  b1 = f32[32]{0} get-tuple-element(b), index=1
  ROOT c = f32[32]{0} fusion(b0, b1), kind=kCustom, calls=end
}
""".replace(
    "GATHERED",
    "channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true",
)


def test_what_runs_beside_several_fusions_counts_once():
    (one,) = read_collectives(Module.from_text(STARTED), 8)
    assert one.name == "g"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('chain_id="0"', 'chain_id="1"'),
        ("channel_id=1", "channel_id=7"),
        ("[1,8]<=[8]", "{{7,6,5,4,3,2,1,0}}"),
    ],
)
def test_what_is_not_of_the_same_chain_counts_by_itself(before, after):
    within = STARTED[STARTED.index("within {") : STARTED.index("end {")]
    assert before in within
    text = STARTED.replace(within, within.replace(before, after))
    found = read_collectives(Module.from_text(text), 8)
    assert [one.name for one in found] == ["g", "g.1"]


def test_without_an_identity_only_what_ends_is_the_same():
    text = STARTED.replace(', frontend_attributes={chain_id="0"}', "")
    found = read_collectives(Module.from_text(text), 8)
    assert [one.name for one in found] == ["g", "g.1"]


BACKGROUND = """
HloModule jit_step, num_partitions=8

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[32]{0} parameter(0), metadata={op_name="x"}
  y = f32[32]{0} parameter(1), metadata={op_name="y"}
  s = ((f32[32]{0}, f32[32]{0}), (f32[4]{0}, f32[4]{0})) reduce-scatter-start(x, y), channel_id=1,
    replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, to_apply=add
  d = (f32[4]{0}, f32[4]{0}) reduce-scatter-done(s)
  d0 = f32[4]{0} get-tuple-element(d), index=0
  d1 = f32[4]{0} get-tuple-element(d), index=1
  ROOT t = (f32[4]{0}, f32[4]{0}) tuple(d1, d0)
}
"""


def test_a_collective_in_the_background_has_its_operands_and_what_comes_out_at_its_end():
    module = Module.from_text(BACKGROUND)
    (one,) = read_collectives(module, 8)
    assert (one.kind, one.name, one.times, one.payload_bytes) == ("reduce-scatter", "s", 1, 256)
    assert [str(array) for array in one.results] == ["f32[4]", "f32[4]"]
    flow = ValueFlow(module)
    assert flow.arguments_of(one.instruction) == (("x",), ("y",))
    assert flow.results_of(one.instruction) == ((1,), (0,))


def test_the_payload_of_a_ragged_exchange_is_what_goes_in():
    (one,) = read_collectives(
        Module.from_text("""
HloModule jit_step, num_partitions=8

ENTRY main {
  x = f32[32]{0} parameter(0)
  room = f32[64]{0} parameter(1)
  table = s64[8]{0} parameter(2)
  ROOT y = f32[64]{0} ragged-all-to-all(x, room, table, table, table, table), channel_id=1,
    replica_groups={{0,1,2,3,4,5,6,7}}
}
"""),
        8,
    )
    assert [str(array) for array in one.operands] == ["f32[32]"]
    assert [str(array) for array in one.results] == ["f32[64]"]
    assert one.payload_bytes == 256


def test_elements_of_half_a_byte_are_counted_as_elements():
    (one,) = read_collectives(
        Module.from_text("""
HloModule jit_step, num_partitions=8

ENTRY main {
  x = s4[3]{0} parameter(0)
  ROOT y = s4[24]{0} all-gather(x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0},
    use_global_device_ids=true
}
"""),
        8,
    )
    assert (one.operands[0].bytes, one.payload_bytes) == (2, 12)


ROUNDED = """
HloModule jit_step, num_partitions=8

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[32,8]{1,0} parameter(0)
  ROOT y = bf16[32,8]{1,0} all-reduce(x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}},
    use_global_device_ids=true, to_apply=add
}
"""


def test_an_all_reduce_may_round_its_sum():
    # Seen on slices of v5e: a gather of a matmul's operand, written as a sum of what is padded.
    (one,) = read_collectives(Module.from_text(ROUNDED), 8)
    assert (one.kind, one.payload_bytes) == ("all-reduce", 1024)
    assert [str(array) for array in (*one.operands, *one.results)] == ["f32[32,8]", "bf16[32,8]"]


@pytest.mark.parametrize(
    ("into", "out"),
    [("bf16", "f32"), ("f32", "s32"), ("s32", "bf16"), ("f64", "bf16"), ("f32", "f8e4m3fn")],
)
def test_other_dtypes_do_not_change_in_a_sum(into, out):
    text = ROUNDED.replace("y = bf16[", f"y = {out}[").replace("x = f32[", f"x = {into}[")
    with pytest.raises(ProgramError, match="what goes in does not fit to what comes out"):
        read_collectives(Module.from_text(text), 8)


def test_a_rounded_sum_has_as_many_elements_as_went_in():
    with pytest.raises(ProgramError, match="what goes in does not fit to what comes out"):
        read_collectives(Module.from_text(ROUNDED.replace("bf16[32,8]", "bf16[32,4]")), 8)
