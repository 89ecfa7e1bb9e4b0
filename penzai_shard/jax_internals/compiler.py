"""Compiles lowered programs and reads what the compiler says of them; nothing runs.

JAX's own ``Lowered.compile`` needs the devices, and its cache takes two programs for equal that
differ in the names of their operations only. A client of jaxlib compiles a program from its bytes,
in any process and for any devices of which there is a description. Read from and run on jax 0.10.2:
https://github.com/jax-ml/jax/blob/main/jax/_src/compiler.py
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import NamedSharding, Sharding
from jaxlib import _hlo  # type: ignore[attr-defined]
from jaxlib import xla_client as xc
from jaxlib.mlir import ir

# Nothing of a program will run, so its code need not be good. It takes half the time to compile;
# collectives and memory are the same to the byte.
_FOR_CPUS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# The type of the elements of a tensor, or of one number.
_BFLOAT16 = re.compile(r"(?<=[x<\s])bf16\b")

# Traced and lowered programs


class ProgramValue(NamedTuple):
    """What a program says of an argument or a result.

    Attributes:
        name: What it calls an argument.
        sharding: Where it lies by the options of ``jax.jit``, or by itself; None where XLA decides.
        donated: Whether a result may take its memory.
        is_weak: Whether its dtype gives way to that of what it meets.
    """

    name: str = ""
    sharding: Sharding | None = None
    donated: bool = False
    is_weak: bool = False


def program_values(traced: Any) -> tuple[list[ProgramValue], list[ProgramValue]]:
    """The arguments of a traced function in the order of ``args_info``, and its results.

    >>> arguments, results = program_values(jax.jit(lambda x, y: x * y[0]).trace(1.0, [3.0]))
    >>> [argument.name for argument in arguments], results[0].is_weak
    (['x', 'y[0]'], True)
    """
    options, jaxpr, infos = traced._params, traced.jaxpr, jax.tree.leaves(traced.args_info)
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.in_avals))
    columns = names, options["in_shardings"], traced._meta_tys_flat
    # Constants that a function holds come first, where JAX passes them as arguments.
    given = [column[len(names) - len(infos) :] for column in columns]
    arguments = []
    for name, option, kind, info in zip(*given, infos, strict=True):
        own = option if isinstance(option, Sharding) else kind.sharding
        arguments.append(ProgramValue(name, own, info.donated, kind.aval.weak_type))
    results = [
        ProgramValue(sharding=own if isinstance(own, Sharding) else None, is_weak=kind.weak_type)
        for own, kind in zip(options["out_shardings"], jaxpr.out_avals, strict=True)
    ]
    return arguments, results


def name_value(argument: str, keys: Any) -> str:
    """What a program calls an array in an argument, from the keys of ``leaves_with_path``.

    >>> ((keys, value),) = jax.tree.leaves_with_path([{"w": 1.0}])
    >>> name_value("layers", keys)
    "layers[0]['w']"
    """
    # Nodes that are registered without keys have the numbers of their children.
    return argument + re.sub(r"<flat index (\d+)>", r"\1", jax.tree_util.keystr(keys))


def donated_arguments(traced: Any) -> tuple[int, ...]:
    """The arguments that functions under ``jax.jit`` inside a traced function donate, by number.

    >>> donate = jax.jit(lambda x, y: x + y, donate_argnums=1)
    >>> donated_arguments(jax.jit(lambda x, y: donate(x, y)).trace(1.0, 2.0))
    (1,)
    """
    jaxpr, donated = traced.jaxpr.jaxpr, set()
    for equation in jaxpr.eqns:
        flags = equation.params.get("donated_invars", ())
        donated |= {id(x) for x, flag in zip(equation.invars, flags, strict=False) if flag}
    return tuple(number for number, variable in enumerate(jaxpr.invars) if id(variable) in donated)


def function_options(traced: Any) -> dict[str, Any]:
    """The compiler options that a function under ``jax.jit`` was given."""
    return dict(traced._params["compiler_options_kvs"])


def kept_arguments(lowered: Any) -> frozenset[int]:
    """Which arguments a program has, by number; JAX drops those that are not used.

    >>> sorted(kept_arguments(jax.jit(lambda x, y, z: x + z).lower(1, 2, 3)))
    [0, 2]
    """
    return frozenset(lowered._lowering.compile_args["kept_var_idx"])


def write_bytecode(lowered: Any, *, with_float16: bool = False) -> bytes:
    """A lowered program as bytes, which any process can compile.

    Args:
        lowered: The program.
        with_float16: Whether float16 takes the place of bfloat16, which has the same size and which
            compilers for CPUs compute, send and hold in float32. Such a program is to be looked at.
    """
    module = lowered.compiler_ir("stablehlo")
    if with_float16:
        text = module.operation.get_asm(enable_debug_info=True)
        module = ir.Module.parse(_BFLOAT16.sub("f16", text), module.context)
    return mlir.module_to_bytecode(module)


# Compiled programs


class MemoryFigures(NamedTuple):
    """What one device needs to run a program, in bytes, as the compiler counts it.

    Attributes:
        arguments: What goes in.
        outputs: What comes out.
        aliased: The part of ``outputs`` that takes the memory of donated arguments.
        temporaries: What is there in between.
        generated_code: The program itself.
        host: All of these in the memory of the host.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    generated_code: int
    host: int

    @property
    def total(self) -> int:
        """All that is in the memory of the device at once, at most."""
        inputs_and_outputs = self.arguments + self.outputs - self.aliased
        return inputs_and_outputs + self.temporaries + self.generated_code


class Compiled(NamedTuple):
    """A compiled program; it can be sent to another process.

    Attributes:
        text: The program, with the names of its operations and without its large constants.
        memory: What it needs.
        input_shardings: Where each argument lies that the program has, as bytes for
            ``read_sharding``; empty where the compiler says nothing.
        output_shardings: The same for its results.
    """

    text: str
    memory: MemoryFigures
    input_shardings: tuple[bytes, ...]
    output_shardings: tuple[bytes, ...]


def compile_options(
    device_count: int, platform: str = "cpu", overrides: Mapping[str, Any] | None = None
) -> bytes:
    """What this process asks of the compiler, by JAX's settings and ``XLA_FLAGS``.

    Args:
        device_count: The number of devices of the program.
        platform: The kind of these devices.
        overrides: Flags of XLA that are asked for besides.
    """
    asked: dict[str, Any] = (_FOR_CPUS if platform == "cpu" else {}) | dict(overrides or {})
    options = compiler.get_compile_options(1, device_count, env_options_overrides=asked)
    return bytes(options.SerializeAsString())


@functools.lru_cache(maxsize=2)
def simulated_devices(count: int) -> list[Any]:
    """CPU devices to compile for, however many JAX has; nothing can run on them.

    JAX fixes the number of its own when it starts, and a process that has more takes two seconds.

    >>> len(simulated_devices(512))
    512
    """
    client: Any = xc.make_cpu_client(num_devices=count)
    return list(client.devices())


def compile_bytecode(
    bytecode: bytes, devices: Sequence[Any], options: bytes | None = None
) -> Compiled:
    """Compiles a program.

    Args:
        bytecode: What ``write_bytecode`` gives.
        devices: The devices, in the order of the mesh; also those of a topology's description.
        options: What ``compile_options`` gives, here or in another process.

    Raises:
        jax.errors.JaxRuntimeError: The compiler refuses the program.
    """
    asked = xc.CompileOptions.ParseFromString(options or compile_options(len(devices)))
    ids = np.array([[device.id for device in devices]])
    asked.device_assignment = xc.DeviceAssignment.create(ids)
    with mlir.make_ir_context():
        module, client = ir.Module.parse(bytecode), devices[0].client
        executable: Any = compiler.backend_compile_and_load(
            client, module, xc.DeviceList(tuple(devices)), asked, []
        )
    printing = _hlo.HloPrintOptions.short_parsable()
    printing.print_metadata = printing.print_percent = True
    printing.print_large_constants = False
    stats = executable.get_compiled_memory_stats()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    figures, on_host = (
        [getattr(stats, f"{place}{kind}_size_in_bytes") for kind in kinds]
        for place in ("", "host_")
    )
    layouts = executable.get_parameter_shardings(), executable.get_output_shardings()
    return Compiled(
        executable.hlo_modules()[0].to_string(printing),
        MemoryFigures(*figures, host=sum(on_host) - 2 * on_host[kinds.index("alias")]),  # type: ignore[misc]
        *(tuple(own.SerializeToString() for own in every or ()) for every in layouts),
    )


def read_sharding(written: bytes, mesh: Any) -> NamedSharding | None:
    """Where the compiler lays an array, over a mesh; None if no spec says so.

    Args:
        written: An element of ``Compiled.input_shardings``.
        mesh: The mesh that the program was compiled for.
    """
    sharding = xc.OpSharding()
    sharding.ParseFromString(written)
    try:
        return NamedSharding(mesh, parse_flatten_op_sharding(sharding, mesh)[0])
    except (NotImplementedError, ValueError):
        return None
