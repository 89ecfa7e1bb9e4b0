"""Where values of a program come from and go to."""

import pytest

from penzai_shard.compiled_programs import Module
from penzai_shard.compiled_programs.value_flow import ValueFlow

# A loop that takes one layer of two stacked parameters per turn, in a fusion, and stacks results;
# a branch, a call, and a permute in the background.
PROGRAM = """
HloModule jit_step

cut {
  %stack = f32[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,8]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%row)
}

body {
  %p = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p), index=0
  %weights = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %out = f32[4,8]{1,0} get-tuple-element(%p), index=2
  %x = f32[8]{0} get-tuple-element(%p), index=3
  %w = f32[8]{0} fusion(%weights, %i.1), kind=kLoop, calls=%cut
  %gathered = f32[16]{0} all-gather(%w), replica_groups={{0,1}}, dimensions={0}
  %used = f32[8]{0} slice(%gathered), slice={[0:8]}
  %y = f32[8]{0} multiply(%used, %x)
  %row.1 = f32[1,8]{1,0} bitcast(%y)
  %zero.1 = s32[] constant(0)
  %stacked = f32[4,8]{1,0} dynamic-update-slice(%out, %row.1, %i.1, %zero.1)
  %one = s32[] constant(1)
  %next = s32[] add(%i.1, %one)
  ROOT %carry = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}, f32[8]{0}) tuple(%next, %weights, %stacked,
      %y)
}

condition {
  %p.1 = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%i.2, %four), direction=LT
}

left {
  %a = f32[8]{0} parameter(0)
  ROOT %left.1 = f32[8]{0} copy(%a)
}

right {
  %b = f32[8]{0} parameter(0)
  ROOT %right.1 = f32[8]{0} reverse(%b), dimensions={0}
}

add {
  %e = f32[] parameter(0)
  %f = f32[] parameter(1)
  ROOT %added = f32[] add(%e, %f)
}

twice {
  %c = f32[8]{0} parameter(0)
  %d = f32[8]{0} parameter(1)
  %sent = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%c),
      source_target_pairs={{0,1},{1,0}}
  %received = f32[8]{0} collective-permute-done(%sent)
  %sum = f32[8]{0} all-reduce(%d), replica_groups={{0,1}}, to_apply=%add
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%received, %sum)
}

ENTRY main {
  %q = f32[4,8]{1,0} parameter(0), metadata={op_name="params['w']"}
  %x.1 = f32[8]{0} parameter(1), metadata={op_name="x"}
  %y.1 = f32[8]{0} parameter(2), metadata={op_name="y"}
  %which = pred[] parameter(3), metadata={op_name="which"}
  %nothing = s32[] constant(0)
  %empty = f32[] constant(0)
  %room = f32[4,8]{1,0} broadcast(%empty), dimensions={}
  %first = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}, f32[8]{0}) tuple(%nothing, %q, %room, %x.1)
  %last = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}, f32[8]{0}) while(%first), condition=%condition,
      body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %ys = f32[4,8]{1,0} get-tuple-element(%last), index=2
  %z = f32[8]{0} get-tuple-element(%last), index=3
  %chosen = f32[8]{0} conditional(%which, %z, %y.1), true_computation=%left,
      false_computation=%right
  %called = (f32[8]{0}, f32[8]{0}) call(%y.1, %chosen), to_apply=%twice
  %u = f32[8]{0} get-tuple-element(%called), index=0
  %v = f32[8]{0} get-tuple-element(%called), index=1
  %w.1 = f32[8]{0} negate(%v)
  ROOT %all = (f32[4,8]{1,0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[4,8]{1,0}) tuple(%ys, %u, %v,
      %w.1, %q)
}
"""


@pytest.fixture(scope="module")
def module():
    return Module.from_text(PROGRAM)


def instruction(module, name):
    (one,) = [one for one in module if one.name == name]
    return one


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gathered", [("params['w']",)]),  # Through a fusion, a loop's carry and a tuple.
        ("y", [("params['w']",), ("x",)]),  # Of the first turn; later ones change x.
        ("left.1", [()]),  # What a product gives is neither of its factors.
        ("right.1", [("y",)]),
        ("sent", [("y",)]),
        ("sum", [("y",)]),  # From one of the branches.
        ("w.1", [("y",)]),
        ("less", [(), ()]),
    ],
)
def test_arguments_are_found_wherever_a_value_goes_unchanged(module, name, arguments):
    assert ValueFlow(module).arguments_of(instruction(module, name)) == tuple(arguments)


@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("y", (0, 2)),  # Stacked by the loop; and through the branch, the call and the sum.
        ("gathered", ()),
        ("sent", (1,)),
        ("sum", (2,)),
        ("q", (4,)),
        ("w.1", (3,)),
    ],
)
def test_results_are_found_wherever_a_value_goes_unchanged(module, name, results):
    assert ValueFlow(module).results_of(instruction(module, name)) == (results,)


def test_arithmetic_is_followed_if_asked_for(module):
    near, far = ValueFlow(module), ValueFlow(module, through={"multiply", "negate"})
    one = instruction(module, "gathered")
    assert (near.results_of(one), far.results_of(one)) == (((),), ((0, 2, 3),))


def test_a_walk_leaves_a_computation_where_it_came_in():
    module = Module.from_text("""
HloModule jit_step

same {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} copy(%a)
}

ENTRY main {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %y = f32[8]{0} parameter(1), metadata={op_name="y"}
  %one = f32[8]{0} call(%x), to_apply=%same
  %two = f32[8]{0} call(%y), to_apply=%same
  %three = f32[8]{0} negate(%one)
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%three, %two)
}
""")
    flow = ValueFlow(module)
    assert flow.arguments_of(instruction(module, "three")) == (("x",),)
    assert flow.results_of(instruction(module, "y")) == ((1,),)
    # Of what is inside, both are true.
    assert flow.results_of(instruction(module, "b")) == ((1,),)
    assert flow.arguments_of(instruction(module, "b")) == (("x", "y"),)
