"""What programs written by hand hold at once, against what can be worked out on paper."""

import pytest

from penzai_shard.compiled_programs import Module
from penzai_shard.compiled_programs.live_values import values_at_peak


def peak(entry, before=""):
    """Name and bytes of each value at the peak of a program."""
    text = f"HloModule m, is_scheduled=true\n{before}\nENTRY e {{\n{entry}\n}}"
    return sorted((v.instruction.name, v.bytes) for v in values_at_peak(Module.from_text(text)))


def test_arguments_and_results_are_no_temporaries():
    assert peak("p = f32[256]{0} parameter(0)\n ROOT r = f32[256]{0} exponential(p)") == []


def test_values_end_with_their_last_use():
    # log(p) is there from the start, and a is gone when c is there.
    program = """
      p = f32[256]{0} parameter(0)
      a = f32[256]{0} exponential(p)
      b = f32[128]{0} slice(a), slice={[0:128]}
      c = f32[256]{0} log(p)
      d = f32[128]{0} slice(c), slice={[0:128]}
      ROOT r = f32[128]{0} add(b, d)"""
    assert peak(program) == [("b", 512), ("c", 1024), ("d", 512)]


def test_the_order_in_which_a_program_runs_decides():
    def program(*middle):
        return "\n".join(
            [
                "p = f32[256]{0} parameter(0)",
                "a = f32[256]{0} exponential(p)",
                *middle,
                "t = f32[2]{0} concatenate(s, u), dimensions={0}",
                "ROOT r = f32[1]{0} slice(t), slice={[0:1]}",
            ]
        )

    s, c, u = (
        "s = f32[1]{0} slice(a), slice={[0:1]}",
        "c = f32[256]{0} log(p)",
        "u = f32[1]{0} slice(c), slice={[0:1]}",
    )
    assert peak(program(s, c, u)) == [("c", 1024), ("s", 4), ("u", 4)]
    assert peak(program(c, s, u)) == [("a", 1024), ("c", 1024), ("s", 4)]


def test_views_and_updates_in_place_take_nothing():
    program = """
      p = f32[256]{0} parameter(0)
      i = s32[] constant(0)
      a = f32[256]{0} exponential(p)
      b = f32[16,16]{1,0} bitcast(a)
      u = f32[1,16]{1,0} constant({...})
      c = f32[16,16]{1,0} dynamic-update-slice(b, u, i, i)
      ROOT r = f32[16]{0} slice(f), slice={[0:16]}"""
    program = program.replace("ROOT", "f = f32[256]{0} bitcast(c)\n ROOT")
    assert peak(program) == [("a", 1024)]


@pytest.mark.parametrize(("last", "most"), [("copy(b)", 1024), ("add(a, b)", 2048)])
def test_an_operand_that_nobody_reads_later_gives_its_memory(last, most):
    program = f"""
      p = f32[256]{{0}} parameter(0)
      a = f32[256]{{0}} exponential(p)
      b = f32[256]{{0}} copy(a)
      c = f32[256]{{0}} {last}
      ROOT r = f32[256]{{0}} exponential(c)"""
    assert sum(size for _, size in peak(program)) == most


def test_arrays_of_a_tuple_end_each_by_itself():
    program = """
      p = f32[256]{0} parameter(0)
      q = f32[64]{0} parameter(1)
      s = (f32[256]{0}, f32[64]{0}) all-reduce(p, q), replica_groups={}, to_apply=add
      a = f32[256]{0} get-tuple-element(s), index=0
      b = f32[64]{0} get-tuple-element(s), index=1
      c = f32[1]{0} slice(a), slice={[0:1]}
      d = f32[128]{0} concatenate(b, b), dimensions={0}
      ROOT r = f32[1]{0} slice(d), slice={[0:1]}"""
    add = "add { x = f32[] parameter(0)\n y = f32[] parameter(1)\n ROOT z = f32[] add(x, y) }"
    # d is written when the larger of the two is gone.
    assert peak(program, add) == [("c", 4), ("s", 256), ("s", 1024)]


@pytest.mark.parametrize("size", [64, 4096])
def test_what_a_loop_carries_counts_once_and_its_body_at_its_peak(size):
    body = f"""
    body {{
      t = (s32[], f32[256]{{0}}) parameter(0)
      i = s32[] get-tuple-element(t), index=0
      x = f32[256]{{0}} get-tuple-element(t), index=1
      w = f32[{size}]{{0}} broadcast(i), dimensions={{}}
      v = f32[1]{{0}} slice(w), slice={{[0:1]}}
      y = f32[256]{{0}} add(x, x)
      ROOT o = (s32[], f32[256]{{0}}) tuple(i, y)
    }}
    condition {{
      c = (s32[], f32[256]{{0}}) parameter(0)
      ROOT k = pred[] constant(false)
    }}"""
    program = """
      p = f32[256]{0} parameter(0)
      n = s32[] constant(0)
      a = f32[256]{0} exponential(p)
      init = (s32[], f32[256]{0}) tuple(n, a)
      l = (s32[], f32[256]{0}) while(init), condition=condition, body=body
      m = f32[256]{0} get-tuple-element(l), index=1
      ROOT r = f32[1]{0} slice(m), slice={[0:1]}"""
    assert peak(program, body) == sorted([("a", 1024), ("v", 4), ("w", size * 4)])


def test_tiles_of_tpus_are_filled_up_and_other_memories_do_not_count():
    program = """
      p = f32[100,200]{1,0:T(8,128)} parameter(0)
      q = f32[200]{0:T(8,128)} parameter(1)
      a = f32[100,200]{1,0:T(8,128)} exponential(p)
      b = f32[100,200]{0,1:T(8,128)} log(p)
      c = f32[100,200]{1,0:T(8,128)S(1)} negate(p)
      d = bf16[3]{0:T(256)(128)(2,1)} constant({1, 2, 3})
      e = bf16[3]{0:T(256)(128)(2,1)} negate(d)
      t = (f32[100,200]{1,0:T(8,128)}, f32[100,200]{0,1:T(8,128)}) tuple(a, b)
      g = f32[100,200]{1,0:T(8,128)} get-tuple-element(t), index=0
      f = f32[200]{0:T(8,128)} negate(q)
      h = f32[1]{0} custom-call(g, b, c, e, f), custom_call_target="any"
      ROOT r = f32[1]{0} negate(h)"""
    sizes = {"a": 104 * 256 * 4, "b": 128 * 200 * 4, "e": 256 * 2, "f": 8 * 256 * 4}
    sizes["h"] = 4
    assert dict(peak(program)) == sizes


def test_what_asynchronous_instructions_give_is_there_from_their_start():
    program = """
      p = f32[64]{0} parameter(0)
      a = f32[64]{0} exponential(p)
      s = (f32[64]{0}, f32[256]{0}) all-gather-start(a), replica_groups={{0,1,2,3}}, dimensions={0}
      b = f32[512]{0} concatenate(p, p, p, p, p, p, p, p), dimensions={0}
      d = f32[256]{0} all-gather-done(s)
      c = f32[1]{0} slice(b), slice={[0:1]}
      ROOT r = f32[1]{0} custom-call(c, d), custom_call_target="any"
      """
    assert peak(program) == [("a", 256), ("b", 2048), ("s", 1024)]
