"""Orders in which a program holds little at once."""

import pytest

from penzai_shard.compiled_programs import Module
from penzai_shard.compiled_programs.lean_orders import in_lean_order
from penzai_shard.compiled_programs.live_values import values_at_peak

BLOCKS = 6
BIG = 4 * 1024


def chain(blocks):
    """Activations one after the other, and of each a sum, all of them at the end."""
    lines = [
        "x = f32[1024]{0} parameter(0)",
        "t = f32[1024]{0} parameter(1)",
        "z = f32[] constant(0)",
    ]
    gathered = [f"w{i} = f32[1024]{{0}} parameter({i + 2})" for i in range(blocks)]
    gathered += [f"g{i} = f32[1024]{{0}} copy(w{i})" for i in range(blocks)]
    lines += [*gathered, "a = f32[1024]{0} add(x, t)"]
    before = "a"
    for i in range(blocks):
        lines.append(f"a{i} = f32[1024]{{0}} multiply({before}, g{i})")
        before = f"a{i}"
    lines += [
        f"sum{i} = f32[] reduce(a{i}, z), dimensions={{0}}, to_apply=plus" for i in range(blocks)
    ]
    sums = ", ".join(f"sum{i}" for i in range(blocks))
    lines.append(f"ROOT r = ({', '.join(['f32[]'] * blocks)}) tuple({sums})")
    body = "\n".join(f"  {line}" for line in lines)
    return Module.from_text(
        "HloModule m, is_scheduled=true\n"
        "plus {\n  p = f32[] parameter(0)\n  q = f32[] parameter(1)\n"
        "  ROOT s = f32[] add(p, q)\n}\n"
        f"ENTRY e {{\n{body}\n}}"
    )


def peak(module):
    return sum(value.bytes for value in values_at_peak(module))


def test_what_is_held_does_not_grow_with_the_blocks_where_it_need_not():
    assert peak(chain(BLOCKS)) >= BLOCKS * BIG
    assert peak(in_lean_order(chain(BLOCKS))) <= 3 * BIG
    assert peak(in_lean_order(chain(2 * BLOCKS))) <= 3 * BIG + 2 * BLOCKS * 4


def test_a_lean_order_has_every_instruction_once_and_behind_its_operands():
    module = chain(3)
    before, after = (one.computations["e"].instructions for one in (module, in_lean_order(module)))
    assert sorted(before) == sorted(after)
    assert list(before) != list(after)
    names = list(after)
    for name, one in after.items():
        assert all(names.index(other) < names.index(name) for other in one.operand_names)
    assert after["r"].is_root


@pytest.mark.parametrize("first", ["late", "early"])
def test_what_waits_for_another_instruction_comes_behind_it(first):
    waits, other = ("early", "late") if first == "late" else ("late", "early")
    lines = {
        "early": "early = f32[8]{0} sine(x)",
        "late": "late = f32[8]{0} cosine(x)",
    }
    lines[waits] += f", control-predecessors={{{other}}}"
    text = (
        "HloModule m, is_scheduled=true\nENTRY e {\n  x = f32[8]{0} parameter(0)\n"
        f"  {lines[other]}\n  {lines[waits]}\n  ROOT s = f32[8]{{0}} add(early, late)\n}}"
    )
    names = list(in_lean_order(Module.from_text(text)).computations["e"].instructions)
    assert names.index(other) < names.index(waits)
