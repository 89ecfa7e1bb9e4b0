"""Instructions that move data between devices, or may, and are not counted as collectives.

What is known to stay on one device is listed; everything else is reported.
"""

import re

from penzai_shard.compiled_programs.executions import executions
from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.compiled_programs.slices import is_between_slices, kind_of_transfer

# Opcodes whose names speak of communication. The parts of collectives are counted elsewhere.
_SPEAKS_OF_IT = re.compile(
    r"(^|-)(all|collective|permute|gather|scatter|broadcast|send|recv|ragged|remote|cross)(-|$)"
)
_COUNTED = re.compile(
    r"(all-gather|all-reduce|collective-permute)(-start|-done)?"
    r"|reduce-scatter|(ragged-)?all-to-all|collective-broadcast"
)
_ON_ONE_DEVICE = frozenset({"after-all", "broadcast", "gather", "scatter", "select-and-scatter"})
# Custom calls that compute, or talk to the host, on each device by itself.
_HARMLESS_CALLS = re.compile(
    r"""
    AsyncCollective(Start|Done)     # Of collectives that are counted.
    | SliceId | ZeroCrop
    | (Sharding|SPMDFullToShardShape|SPMDShardToFullShape|MoveToHost|MoveToDevice)
    | ConcatBitcast                 # Parts of an array that are in one place of memory already.
    | (annotate_device_placement|AllocateBuffer|AllocatePersistentBuffer|Pin|Unpin|CreateBuffer)
    | (TopK|ApproxTopK|PartialReduce|AggregateToTopK|AssumeGatherIndicesInBound|XlaTransform)
    | (EigenMatMul|__onednn\$.*|__eigen\$.*|__xnnpack\$.*|__cublas\$.*|__cudnn\$.*|__cub\$.*)
    | (cublas_.*|cusolver_.*|cusparse_.*|cu_.*|cudnn.*|hip.*|rocm.*|lapack_.*|magma.*|ducc_fft.*)
    | (ResizeNearest|ResizeBilinear|RngBitGenerator|threefry2x32.*|GatherScatterIndices.*)
    | (Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors|Cholesky|InspectSharding)
    | (xla_python_(cpu|gpu)_callback|xla_ffi_(partitioned_)?python_(cpu|gpu)_callback)
    | (__triton.*|triton_kernel_call|__gpu\$xla\.gpu\.triton|x86\.fast_.*|__xla_.*_math.*)
    """,
    re.VERBOSE,
)
_PALLAS = "tpu_custom_call"
_TO_HOST = frozenset({"infeed", "outfeed"})


def unknown_communication(module: Module) -> tuple[str, ...]:
    """What may move data between devices and is in no report, one sentence for each instruction.

    Those in computations that never run are left out.
    """
    times = executions(module)
    return tuple(
        f"{one.name}: {reason}"
        for one in module
        if one.computation in times and (reason := _reason(one)) is not None
    )


def _reason(one: Instruction) -> str | None:
    if one.opcode == "custom-call":
        target = one.attributes.get("custom_call_target", "").strip('"')
        if _HARMLESS_CALLS.fullmatch(target):
            return None
        if target == _PALLAS and (settings := one.attributes.get("backend_config")) is not None:
            # JAX writes it for each kernel that has such an operation.
            if '"has_communication":true' not in settings.replace(" ", ""):
                return None
            return "a Pallas kernel that sends to other devices; what it moves is not counted."
        return f"a custom call of {target!r}; whether it moves data between devices is not known."
    if one.opcode in ("send", "recv"):
        return _reason_of_transfer(one)
    if one.opcode in _ON_ONE_DEVICE | _TO_HOST or _COUNTED.fullmatch(one.opcode):
        return None
    if one.opcode in ("send-done", "recv-done") or not _SPEAKS_OF_IT.search(one.opcode):
        return None
    return f"an instruction that is not known, {one.opcode}; what it moves is not counted."


def _reason_of_transfer(one: Instruction) -> str | None:
    if one.attributes.get("is_host_transfer") != "true":
        return f"a {one.opcode} between devices; what it moves is not counted."
    if one.opcode == "send" and is_between_slices(one) and kind_of_transfer(one) is None:
        return "a transfer between slices of a kind that is not known; it is not counted."
    return None
