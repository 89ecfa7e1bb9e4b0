"""Programs of several TPU slices: what goes within each, and what goes between them."""

import dataclasses
import pathlib

import pytest

from penzai_shard.compiled_programs import (
    Module,
    ValueFlow,
    read_collectives,
    unknown_communication,
)
from penzai_shard.errors import ProgramError

PROGRAMS = pathlib.Path(__file__).parent / "programs" / "tpu_slices"
SIZE = 16 * 256 * 2  # An array of 16 x 256 in bfloat16.


def figures(module, mesh, slice_of=None):
    found = [
        (one.kind, one.axes(mesh).text, one.payload_bytes, one.times)
        for one in read_collectives(module, 8, slice_of)
    ]
    return sorted(found, key=str)


def recorded(name):
    return Module.from_text((PROGRAMS / f"{name}.hlo").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["one_of_each", "loops", "parts_of_axes"])
def test_a_program_is_for_one_slice_and_nothing_in_it_is_unknown(name):
    module = recorded(name)
    assert module.partitions == 4
    assert unknown_communication(module) == ()


def test_sums_over_slices_and_within_them_are_kept_apart():
    # The mesh that it was made for: of the first axis each half is a slice.
    mesh = {"outer": 2, "inner": 2, "model": 2}
    assert figures(recorded("parts_of_axes"), mesh) == [
        ("all-reduce", "inner x model", SIZE, 1),
        ("all-reduce", "inner", SIZE, 1),
        ("all-reduce", "outer", SIZE, 1),
    ]


def test_a_sum_over_a_mesh_axis_of_several_slices_is_scattered_summed_and_gathered():
    mesh = {"slice": 2, "inner": 2, "model": 2}
    found = figures(recorded("loops"), mesh)
    for expected in [
        ("reduce-scatter", "inner", SIZE, 15),
        ("all-reduce", "slice", SIZE // 2, 15),
        ("all-gather", "inner", SIZE, 15),
    ]:
        assert expected in found


def test_each_kind_goes_between_slices():
    mesh = {"slice": 2, "inner": 2, "model": 2}
    between = {
        (one.kind, one.payload_bytes, one.groups)
        for one in read_collectives(recorded("one_of_each"), 8)
        if one.instruction.opcode == "send"
    }
    across = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert {groups for kind, _, groups in between if kind.startswith("all-reduce")} == {across}
    assert ("all-to-all", SIZE, ((0, 2, 4, 6), (1, 3, 5, 7))) in between
    assert ("reduce-scatter", 2 * SIZE, across) in between
    # From each device to the next one of four, of which two are in the other slice.
    assert ("collective-permute", SIZE, ((2, 4), (6, 0), (3, 5), (7, 1))) in between
    assert ("collective-permute", "slice x inner (2 of 8 devices send)", SIZE, 1) in figures(
        recorded("one_of_each"), mesh
    )


def test_slices_may_be_anywhere_in_the_mesh():
    module = recorded("parts_of_axes")
    mesh = {"inner": 2, "model": 2, "outer": 2}
    slice_of = [0, 1] * 4
    assert figures(module, mesh, slice_of) == [
        ("all-reduce", "inner x model", SIZE, 1),
        ("all-reduce", "inner", SIZE, 1),
        ("all-reduce", "outer", SIZE, 1),
    ]
    with pytest.raises(ProgramError, match="for slices of 4 devices each, and there are 8 devices"):
        read_collectives(module, 8, [0, 0, 1, 1, 1, 1, 1, 1])


def test_the_slices_of_the_devices_say_how_large_they_are_where_the_module_does_not():
    module = recorded("parts_of_axes")
    mesh, slice_of = {"inner": 2, "model": 2, "outer": 2}, [0, 1] * 4
    unsaid = dataclasses.replace(module, partitions=None)
    assert figures(unsaid, mesh, slice_of) == figures(module, mesh, slice_of)


PROGRAM = """
HloModule jit_step, num_partitions=2

ENTRY main {
  p = bf16[8]{0} parameter(0), metadata={op_name="x"}
  t = token[] after-all()
  s = (bf16[8]{0}, u32[], token[]) send(p, t), channel_id=2, is_host_transfer=true,
    frontend_attributes={_xla_host_transfer_rendezvous="psum_0",_xla_megascale_target=TARGET,
    _xla_megascale_transfer_type="TYPE"}
  r = (bf16[8]{0}, u32[], token[]) recv(t), channel_id=1, is_host_transfer=true,
    frontend_attributes={_xla_host_transfer_rendezvous="psum_0",_xla_megascale_target=TARGET,
    _xla_megascale_transfer_type="TYPE"}
  sd = token[] send-done(s), channel_id=2, is_host_transfer=true
  rd = (bf16[8]{0}, token[]) recv-done(r), channel_id=1, is_host_transfer=true
  ROOT y = bf16[8]{0} get-tuple-element(rd), index=0
}
"""


def program(target, kind="ALL_REDUCE"):
    return Module.from_text(PROGRAM.replace("TARGET", target).replace("TYPE", kind))


@pytest.mark.parametrize(
    ("target", "kind", "groups"),
    [
        ('"{1,2,3,4}x{0:1}"', "ALL_REDUCE", ((0, 2, 4, 6), (1, 3, 5, 7))),
        (
            "{{100000,200000},{100001,200001},{300000,400000},{300001,400001}}",
            "ALL_REDUCE",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
        ("{{100000->400001},{400001->100000}}", "ONE_TO_ONE", ((0, 7), (7, 0))),
    ],
)
def test_each_form_of_transfers_is_read(target, kind, groups):
    module = program(target, kind)
    (one,) = read_collectives(module, 8)
    assert (one.groups, one.payload_bytes) == (groups, 16)
    flow = ValueFlow(module)
    assert flow.arguments_of(one.instruction) == (("x",),)
    assert flow.results_of(one.instruction) == ((0,),)
    assert flow.arguments_of(module.computations["main"].root) == (("x",),)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ('""', "ALL_REDUCE"),
        ('"{1,2}x{0:1}"', "ALL_REDUCE"),
        ('"{1,2,3,4}x{0:3}"', "ALL_REDUCE"),
        ('"{1,2,3,4}x{0:1}"', "ONE_TO_ONE"),
        ("{{100000,500000}}", "ALL_REDUCE"),
        ("{{100000,200002}}", "ALL_REDUCE"),
        ("{{0,200000}}", "ALL_REDUCE"),
        ("{{100000,200000},{100000,300000}}", "ALL_REDUCE"),
        ("{{100000->200000}}", "ALL_REDUCE"),
        ("{{100000,200000}}", "ONE_TO_ONE"),
        ("{{100000->200000},{300000->200000}}", "ONE_TO_ONE"),
        ("{{100000,200000},{100001,200001}}", "ALL_GATHER"),
    ],
)
def test_other_forms_are_refused(target, kind):
    with pytest.raises(ProgramError, match=r"(?s)s \(send\): "):
        read_collectives(program(target, kind), 8)


def test_a_transfer_of_a_kind_that_is_not_known_is_reported():
    (found,) = unknown_communication(program('"{1,2,3,4}x{0:1}"', "ALL_SCATTER"))
    assert found.startswith("s: a transfer between slices of a kind that is not known")
