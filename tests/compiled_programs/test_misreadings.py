"""What the reader of collectives must not let through, and what it must not stumble over."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.compiled_programs import Module, read_collectives, unknown_communication
from penzai_shard.errors import ProgramError
from penzai_shard.inspection.program_view import compile_step
from penzai_shard.inspection.traffic.collective_report import CollectiveReport

PROGRAM = """
HloModule jit_step, num_partitions=8

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

started {
  p.1 = f32[16,8]{1,0} parameter(0)
  g.1 = f32[64,8]{1,0} all-gather(p.1), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0),
    dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}
  ROOT s.1 = (f32[16,8]{1,0}, f32[64,8]{1,0}, u32[]) custom-call(g.1),
    custom_call_target="AsyncCollectiveStart"
}

ended {
  p.2 = f32[16,8]{1,0} parameter(0)
  q.2 = f32[64,8]{1,0} parameter(1)
  g.2 = f32[64,8]{1,0} all-gather(p.2), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0),
    dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}
  ROOT s.2 = f32[64,8]{1,0} custom-call(p.2, q.2, g.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY main {
  p = f32[16,8]{1,0} parameter(0), metadata={op_name="x"}
  gather = f32[64,8]{1,0} all-gather(p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0),
    dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/all_gather"}
  start = (f32[64,8]{1,0}, f32[256,8]{1,0}) all-gather-start(gather), channel_id=2,
    replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, use_global_device_ids=true
  done = f32[256,8]{1,0} all-gather-done(start)
  reduce = f32[256,8]{1,0} all-reduce(done), channel_id=3, to_apply=add,
    replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, use_global_device_ids=true
  permute = f32[256,8]{1,0} collective-permute(reduce), channel_id=4,
    source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
  zero = f32[] constant(0)
  topk = f32[16]{0} custom-call(p), custom_call_target="TopK"
  first = (f32[16,8]{1,0}, f32[64,8]{1,0}, u32[]) fusion(p), kind=kCustom, calls=started
  kept = f32[16,8]{1,0} get-tuple-element(first), index=0
  room = f32[64,8]{1,0} get-tuple-element(first), index=1
  last = f32[64,8]{1,0} fusion(kept, room), kind=kCustom, calls=ended
  ROOT all = (f32[256,8]{1,0}, f32[64,8]{1,0}, f32[16]{0}) tuple(permute, last, topk)
}
"""
KINDS = ["all-gather", "all-gather", "all-reduce", "collective-permute", "all-gather"]
BYTES = [2048, 8192, 8192, 8192, 2048]


def changed(name, before="", after="", opcode=None):
    """The program, one instruction of which says something else than the compiler lets it say."""
    module = Module.from_text(PROGRAM)
    (one,) = [one for one in module if one.name == name]
    text = re.sub(r"^%", "", one.text)
    assert before in text, text
    if opcode is not None:
        text = text.replace(f" {one.opcode}(", f" {opcode}(")
    new = dataclasses.replace(one, opcode=opcode or one.opcode)
    vars(new)["text"] = text.replace(before, after) if before else text
    module.computations[one.computation].instructions[name] = new
    return module


def test_the_program_itself_is_read():
    module = Module.from_text(PROGRAM)
    assert [one.kind for one in read_collectives(module, 8)] == KINDS
    assert [one.payload_bytes for one in read_collectives(module, 8)] == BYTES
    assert unknown_communication(module) == ()


ALONG_DATA = "[2,4]<=[4,2]T(1,0)"
BY_MESH = "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}"
PAIRS = "{{0,2},{2,4},{4,6},{6,0}}"
LISTED = "{{0,2,4,6},{1,3,5,7}}"


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("gather", ALONG_DATA, "ring(8)", "in a form that is not known: 'ring"),
        ("gather", ALONG_DATA, "[2,4]<=[4,4]T(1,0)", "16 devices are not of shape"),
        ("gather", ALONG_DATA, "[2,4]<=[4,2]T(1,1)", "is not an order"),
        ("gather", ALONG_DATA, "[2,2,2]<=[8]", "are not of shape"),
        ("gather", f", replica_groups={ALONG_DATA}", "", "it has no replica_groups"),
        ("gather", "replica_groups", "device_groups", "it has no replica_groups"),
        ("gather", ALONG_DATA, "[4,2]<=[8]", "does not fit to what comes out in groups of 2"),
        ("gather", "f32[64,8]", "f32[32,8]", "does not fit"),
        ("gather", "f32[64,8]", "bf16[64,8]", "does not fit"),
        ("gather", "f32[64,8]", "f32[?,8]", "not a type"),
        ("gather", "f32[64,8]", "matrix", "not a type"),
        ("gather", ", use_global_device_ids=true", "", "but of copies of the program"),
        ("start", LISTED, "{{0,2,4,6},{1,3,5,8}}", "there is a device 8"),
        ("start", LISTED, "{{0,2,4,6},{1,3,5,6}}", "a device is in two groups"),
        ("start", LISTED, "{{0,2,4,6},{1,3,5}}", "groups of different sizes"),
        ("start", LISTED, "{{0,2,4,6},{1,3,5,-7}}", "in a form that is not known"),
        ("start", "(f32[64,8]{1,0}, f32[256,8]{1,0})", "f32[256,8]{1,0}", "does not say what"),
        ("reduce", BY_MESH, "mesh['axis_0'=4,'axis_1'=2] {'axis_2'}", "not axes of the mesh"),
        ("reduce", BY_MESH, "mesh['axis_0'=8] {'axis_0':(1)4,'axis_0':(2)2}", "overlap"),
        ("reduce", BY_MESH, "mesh['axis_0'=8], device_ids=(reversed) {'axis_0'}", "an order of"),
        ("permute", PAIRS, "{{0,2,4},{2,4,6}}", "not pairs"),
        ("permute", PAIRS, "{{0,2},{2,2}}", "in one twice"),
        ("permute", PAIRS, "[2,4]<=[8]", "not pairs"),
        ("permute", "source_target_pairs", "replica_groups", "it has no source_target_pairs"),
        ("g.2", "channel_id=5", "channel_id=6", "it ends, and starts nowhere"),
        ("s.1", "AsyncCollectiveStart", "AsyncCollectiveBegin", "it ends, and starts nowhere"),
    ],
)
def test_a_collective_that_cannot_be_read_is_refused_by_name(name, before, after, message):
    named = {"s.1": "g.2"}.get(name, name)
    with pytest.raises(ProgramError, match=rf"{re.escape(named)} \([a-z-]+\): .*{message}"):
        read_collectives(changed(name, before, after), 8)


def test_all_that_cannot_be_read_is_named_at_once():
    module = changed("gather", ALONG_DATA, "ring(8)")
    other = changed("permute", PAIRS, "{{0,0,0}}").computations["main"].instructions["permute"]
    module.computations["main"].instructions["permute"] = other
    with pytest.raises(ProgramError, match=r"(?s)gather \(.*permute \(collective-permute\)"):
        read_collectives(module, 8)


@pytest.mark.parametrize(
    ("name", "before", "after", "opcode"),
    [
        ("gather", "", "", "all-gather-foo"),
        ("gather", "", "", "all-scatter"),
        ("reduce", "", "", "all-reduce-scatter"),
        ("permute", "", "", "collective-permute-multi"),
        ("permute", "", "", "neighbour-permute"),
        ("permute", "", "", "remote-copy"),
        ("permute", "", "", "send"),
        ("permute", "", "", "recv"),
        ("permute", "", "", "ragged-all-gather"),
        ("topk", '"TopK"', '"my_nccl_all_reduce"', None),
        ("topk", '"TopK"', '"tpu_custom_call"', None),
        ("topk", '"TopK"', '"TopKAcrossDevices"', None),
        ("topk", ', custom_call_target="TopK"', "", None),
    ],
)
def test_what_may_communicate_and_is_not_known_is_reported_by_name(name, before, after, opcode):
    (found,) = unknown_communication(changed(name, before, after, opcode))
    assert found.startswith(f"{name}: ")
    assert "is not known" in found or "is not counted" in found


def test_the_report_of_a_step_says_so():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    by_data = NamedSharding(mesh, PartitionSpec("data"))
    program = compile_step(
        jax.jit(jnp.sum), jax.ShapeDtypeStruct((8,), "float32", sharding=by_data)
    )
    module = changed("topk", '"TopK"', '"my_nccl_all_reduce"')
    report = CollectiveReport.of(dataclasses.replace(program, module=module))
    assert "topk: a custom call of 'my_nccl_all_reduce'; whether it moves data" in str(report)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        # The same groups in another form or order.
        ("gather", ALONG_DATA, LISTED),
        ("gather", ALONG_DATA, "{{7,5,3,1},{6,4,2,0}}"),
        ("gather", ALONG_DATA, "mesh[a=4,b=1,c=2] {a}"),
        ("gather", ALONG_DATA, "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}"),
        ("gather", ALONG_DATA, "mesh['a'=8] {'a':(1)2,'a':(2)2}"),
        ("start", LISTED, ALONG_DATA),
        # Texts that look like attributes, brackets and quotes in them.
        ("gather", "jit(f)/", 'jit(f)/replica_groups={{0}}, channel_id=7/\\"(/'),
        ("gather", "jit(f)/", "jit(f)/((a:b/"),
        ("gather", "metadata=", 'frontend_attributes={a="]}", b=", replica_groups="}, metadata='),
        ("gather", "metadata=", 'backend_config={"groups":["{{0,1}}"]}, metadata='),
        ("gather", ', metadata={op_name="jit(f)/all_gather"}', ""),
        ("gather", "metadata=", "sharding={devices=[4,1,2]<=[8]}, metadata="),
        # Layouts and counts of parts.
        ("gather", "{1,0}", "{1,0:T(8,128)(2,1)S(1)}"),
        ("gather", "{1,0}", ""),
        ("start", "(f32[64,8]", "(/*index=0*/f32[64,8]"),
        ("start", "f32[256,8]{1,0})", "f32[256,8]{1,0}, u32[], u32[])"),
        ("start", "(f32[64,8]{1,0}, f32[256,8]{1,0})", "((f32[64,8]), (f32[256,8]))"),
        ("permute", PAIRS, "{{0,0},{1,1}}"),
        ("permute", PAIRS, "{}"),
        ("topk", "TopK", "__cublas$gemm"),
        ("topk", "TopK", "xla_ffi_python_cpu_callback"),
    ],
)
def test_harmless_differences_change_nothing(name, before, after):
    module = changed(name, before, after)
    assert [one.kind for one in read_collectives(module, 8)] == KINDS
    assert [one.payload_bytes for one in read_collectives(module, 8)] == BYTES
    assert unknown_communication(module) == ()


@pytest.mark.parametrize(
    "opcode",
    [
        "gather",
        "scatter",
        "broadcast",
        "select-and-scatter",
        "infeed",
        "partition-id",
        "call-start",
    ],
)
def test_names_that_are_alike_are_not_taken_for_communication(opcode):
    assert unknown_communication(changed("topk", opcode=opcode)) == ()


PALLAS = '"tpu_custom_call", backend_config={"custom_call_config":{"body":"TUzvUgFN",SETTING}}'


def test_a_kernel_that_sends_to_other_devices_says_so():
    module = changed("topk", '"TopK"', PALLAS.replace("SETTING", '"has_communication":true'))
    (found,) = unknown_communication(module)
    assert found.startswith("topk: a Pallas kernel that sends to other devices")


def test_a_kernel_that_does_not_say_so_stays_on_its_device():
    module = changed("topk", '"TopK"', PALLAS.replace("SETTING", '"needs_layout_passes":true'))
    assert unknown_communication(module) == ()


def test_what_never_runs_is_not_reported():
    module = changed("topk", '"TopK"', '"my_nccl_all_reduce"')
    instructions = module.computations["main"].instructions
    reported = instructions.pop("topk")
    never = dataclasses.replace(reported, computation="never")
    vars(never)["text"] = reported.text
    module.computations["never"] = dataclasses.replace(
        module.computations["add"], name="never", instructions={"topk": never}
    )
    assert unknown_communication(module) == ()


def test_what_goes_to_the_host_is_no_communication_between_devices():
    module = changed("topk", "custom_call_target=", "is_host_transfer=true, x=", opcode="send")
    assert unknown_communication(module) == ()
