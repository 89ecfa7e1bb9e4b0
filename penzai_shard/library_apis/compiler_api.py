"""What this library uses of XLA's Python interface, which jaxlib keeps for JAX: compiled modules.

``jaxlib._hlo`` takes a compiled program apart; a client of ``jaxlib`` compiles a lowered one for
any devices that there is a description of, without JAX' own arrays on them.
"""

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax.sharding import NamedSharding, Sharding
from jaxlib import _hlo  # type: ignore[attr-defined]
from jaxlib import xla_client as xc
from jaxlib.mlir import ir

# jaxlib has no types for these.
HloModule = Any
HloInstruction = Any


_IS_JAXLIB_010 = jaxlib.__version__.startswith("0.10.")

FOR_PRICES_ON_CPUS: Mapping[str, bool | int | str] = {
    # Nothing of it will run: code is made as fast as it can be. Collectives and memory are those
    # of code that is made well, which takes four to seven times as long.
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    # The older of two ways to make code, which later releases do not have.
    **({"xla_cpu_use_fusion_emitters": False} if _IS_JAXLIB_010 else {}),
    # Operations in an order that needs little memory, as compilers for TPUs have it, not in one
    # that keeps many processors busy. Then what ``jax.checkpoint`` computes again must not be free
    # to come early, nor must gradients wait for each other to be summed in one.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    # Products of matrices in float16 must not be computed, held and sent in float32 either.
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner,change-op-data-type",
}
"""Flags of XLA for programs for CPUs that are only looked at."""


@dataclasses.dataclass(frozen=True)
class ExecutableMemory:
    """What one device needs to run a program, in bytes, as the compiler counts it.

    Attributes:
        arguments: What comes in.
        outputs: What goes out, the aliased part included.
        aliased: The part of the outputs that takes the place of donated arguments.
        temporaries: What is there in between.
        generated_code: The program itself.
        host: All of these that are in the host's memory instead.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    generated_code: int
    host: int = 0

    @property
    def total(self) -> int:
        """What is needed at once on the device."""
        parts = (self.arguments, self.outputs, self.temporaries, self.generated_code)
        return sum(parts) - self.aliased


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program that a compiler made, with nothing of it on a device.

    Attributes:
        module: The program.
        memory: What it needs.
    """

    module: HloModule
    memory: ExecutableMemory


def opcode_of(instruction: HloInstruction) -> str:
    """The opcode as programs' texts have it.

    >>> module = module_from_text("HloModule m\\nENTRY e { ROOT p = f32[2]{0} parameter(0) }")
    >>> opcode_of(module.computations()[0].instructions()[0])
    'parameter'
    """
    name = instruction.opcode.name.removeprefix("k")
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).removeprefix("-")


def wrapped_by(instruction: HloInstruction) -> HloInstruction:
    """What an ``async-start``, ``async-update`` or ``async-done`` runs in the background."""
    return instruction.async_wrapped_root()


def short_text(module: HloModule) -> str:
    """A program's text without what is not its structure: names of operations, settings."""
    return _text(module, with_metadata=False)


def instructions_in_order(module: HloModule, computation: Any) -> list[HloInstruction]:
    """The instructions of a computation, in the order in which they run if that is known."""
    instructions = {one.name: one for one in computation.instructions()}
    schedule = module.schedule()
    if schedule is None:
        return list(instructions.values())
    try:
        return [instructions[one.name] for one in schedule.sequence(computation)]
    except IndexError:
        # What is fused runs as one instruction, in no order of its own.
        return list(instructions.values())


def text_with_frames(module: HloModule) -> str:
    """A program's text with the tables of files, functions and stack frames in front."""
    return _text(module, with_metadata=True)


def _text(module: HloModule, with_metadata: bool) -> str:
    options = _hlo.HloPrintOptions.short_parsable()
    options.print_metadata = with_metadata
    options.print_backend_config = False
    options.print_large_constants = False
    return str(module.to_string(options))


def module_from_text(text: str) -> HloModule:
    """Reads a program's text, as ``HloModule.to_string`` and ``Compiled.as_text`` give it."""
    return _hlo.hlo_module_from_text(text)


@dataclasses.dataclass(frozen=True)
class TracedArgument:
    """An array that goes into a traced function.

    Attributes:
        name: What the program calls it, as ``inputs['tokens'].data_array``.
        sharding: What ``jax.jit`` was told of its layout, or that of the array that is committed
            to one; None if the compiler is free to choose.
        donated: Whether a result may take its memory.
    """

    name: str
    sharding: Sharding | None
    donated: bool


def traced_arguments(traced: jax.stages.Traced) -> list[TracedArgument]:
    """The arrays that go into a traced function, in the order of ``traced.args_info``.

    >>> traced = jax.jit(lambda x, n, y: x * n, static_argnums=1).trace(1.0, 2, [3.0])
    >>> [argument.name for argument in traced_arguments(traced)]
    ['x', 'y[0]']
    """
    given: Any = traced
    infos = jax.tree.leaves(traced.args_info)
    # Constants that a function holds come first, where JAX passes them to programs as arguments.
    first = len(given.jaxpr.in_avals) - len(infos)
    names = given.jaxpr.debug_info.safe_arg_names(len(given.jaxpr.in_avals))[first:]
    declared = given._params["in_shardings"][first:]
    types = given._meta_tys_flat[first:]
    return [
        TracedArgument(name, _sharding_of(of_jit, kind), info.donated)
        for name, of_jit, kind, info in zip(names, declared, types, infos, strict=True)
    ]


def _sharding_of(declared: Any, kind: Any) -> Sharding | None:
    if isinstance(declared, Sharding):
        return declared
    return kind.sharding if kind.committed and isinstance(kind.sharding, Sharding) else None


def compiler_options_of(traced: jax.stages.Traced) -> dict[str, Any]:
    """What a function under ``jax.jit`` asks of the compiler.

    >>> options = {"xla_backend_optimization_level": 1}
    >>> compiler_options_of(jax.jit(lambda x: x, compiler_options=options).trace(1.0))
    {'xla_backend_optimization_level': 1}
    """
    given: Any = traced
    return dict(given._params["compiler_options_kvs"])


def kept_arguments(lowered: jax.stages.Lowered) -> frozenset[int]:
    """Which arguments the program has, by their number; JAX drops those that are not used.

    >>> sorted(kept_arguments(jax.jit(lambda x, y, z: x + z).lower(1, 2, 3)))
    [0, 2]
    """
    given: Any = lowered
    return frozenset(given._lowering.compile_args["kept_var_idx"])


def shardings_of(lowered: jax.stages.Lowered) -> list[Sharding]:
    """The layouts on devices that a program says: of arguments, results and in between.

    >>> shardings_of(jax.jit(lambda x: x + 1).lower(1.0))
    []
    """
    given: Any = lowered
    said = given._lowering.compile_args
    return [
        sharding
        for name in ("in_shardings", "out_shardings", "intermediate_shardings")
        for sharding in said[name] or ()
        if isinstance(sharding, NamedSharding)
    ]


# The type of a tensor's elements, or of one number.
_BFLOAT16 = re.compile(r"(?<=[x<\s])bf16\b")


def module_from_bytes(data: bytes) -> HloModule:
    """Reads a program as ``module_to_bytes`` gives it."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(data)


def module_to_bytes(module: HloModule) -> bytes:
    """A program as bytes, for another process."""
    return bytes(module.as_serialized_hlo_module_proto())


def bytecode_of(lowered: jax.stages.Lowered, *, with_float16: bool = False) -> bytes:
    """A lowered program as bytes, which ``compile_bytecode`` takes, in this process or another.

    Args:
        lowered: The program.
        with_float16: Whether it has float16 in the place of bfloat16, which is as large. Compilers
            for CPUs compute in float32 what is in bfloat16, and send and hold it so, and float16 as
            it is. Such a program is to be priced, not to be run.
    """
    written = io.BytesIO()
    module: Any = lowered.compiler_ir("stablehlo")
    if with_float16 and _BFLOAT16.search(text := module.operation.get_asm(enable_debug_info=True)):
        module = type(module).parse(_BFLOAT16.sub("f16", text), module.context)
    module.operation.write_bytecode(written)
    return written.getvalue()


def is_lacking_devices(error: Exception) -> bool:
    """Whether JAX did not lower a program because it calls back to Python, and devices are absent.

    Args:
        error: What lowering raised.
    """
    texts = (
        "require devices to be present during lowering",
        "different from the lowering platform",
    )
    return isinstance(error, ValueError) and any(text in str(error) for text in texts)


def options_of_this_process(
    device_count: int, others: Mapping[str, bool | int | str] | None = None
) -> bytes:
    """What JAX' settings and ``XLA_FLAGS`` ask of the compiler here, for any process.

    Args:
        device_count: For how many devices a program is.
        others: Flags of XLA that are asked for besides.

    >>> options_of_this_process(1) == options_of_this_process(1, {"xla_cpu_enable_fast_math": True})
    False
    """
    overrides: dict[str, Any] = dict(others or {})
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=device_count, env_options_overrides=overrides
    )
    return bytes(options.SerializeAsString())


def compile_bytecode(
    bytecode: bytes, devices: Sequence[Any], options: bytes | None = None
) -> Compiled:
    """Compiles a lowered program for devices, in the order in which its mesh has them.

    Args:
        bytecode: As ``bytecode_of`` gives it.
        devices: Those of this process, or those of a topology that is described.
        options: Those of another process; this process's own by default.

    Returns:
        The program, and what it needs.

    Raises:
        jax.errors.JaxRuntimeError: As the compiler has it; for instance, the program does not fit
            into the devices' memory.
    """
    asked = xc.CompileOptions.ParseFromString(options or options_of_this_process(len(devices)))
    ids = np.array([[device.id for device in devices]])
    asked.device_assignment = xc.DeviceAssignment.create(ids)
    with mlir.make_ir_context():
        executable = compiler.backend_compile_and_load(
            devices[0].client,
            ir.Module.parse(bytecode),
            xc.DeviceList(tuple(devices)),
            asked,
            [],
        )
    return _read(executable)


def slices_of(devices: Sequence[Any]) -> tuple[int, ...] | None:
    """Which TPU slice each device is of; None if they do not say, as those of one slice."""
    numbers = tuple(getattr(device, "slice_index", None) for device in devices)
    return None if None in numbers else numbers  # type: ignore[return-value]


def _read(executable: Any) -> Compiled:
    (module,) = executable.hlo_modules()
    stats = executable.get_compiled_memory_stats()
    host = sum(
        getattr(stats, f"host_{name}_size_in_bytes")
        for name in ("argument", "output", "temp", "generated_code")
    )
    memory = ExecutableMemory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        host - stats.host_alias_size_in_bytes,
    )
    return Compiled(module, memory)
