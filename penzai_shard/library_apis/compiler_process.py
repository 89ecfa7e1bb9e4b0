"""The process that compiles for devices that are not there. Started as a script, by its path.

It reads from standard input for which devices, then a lowered program, and answers with what the
compiler made of it. Of this package it imports one module, since the whole takes longer to import
than most programs take to compile.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal, TypedDict


class DevicesWanted(TypedDict):
    """What the process is asked for first: the devices to compile for.

    ``search_path`` is where Python finds modules; ``topology`` and ``topology_options`` are JAX'
    name and options of what ``platform`` is to be described.
    """

    search_path: list[str]
    platform: Literal["cpu", "tpu", "cuda"]
    topology: str
    topology_options: dict[str, Any]


class Program(TypedDict):
    """What it is asked for then: to compile a program.

    ``dcn_shape`` says over how many slices each mesh axis goes; the network between slices is the
    slow one. Without a mesh the program is for one device. ``options`` are those of
    ``compiler_api.options_of_this_process``.
    """

    bytecode: bytes
    mesh_shape: dict[str, int]
    dcn_shape: tuple[int, ...]
    options: bytes


class Answer(TypedDict, total=False):
    """What came of it: a program, or the step that failed with the message of the failure."""

    module: bytes
    memory: dict[str, int]
    device_kind: str
    slice_of: tuple[int, ...] | None
    seconds: float
    failed: Literal["devices", "mesh", "compile"]
    message: str


def absent_devices(wanted: DevicesWanted) -> list[Any]:
    """Descriptions of devices, or simulated ones."""
    import jax
    from jax.experimental import topologies

    if wanted["platform"] == "cpu":
        return list(jax.devices("cpu"))
    topology = topologies.get_topology_desc(
        wanted["topology"], wanted["platform"], **wanted["topology_options"]
    )
    return list(topology.devices)


def mesh_devices(program: Program, devices: Sequence[Any]) -> list[Any]:
    """The devices in the order in which a mesh of all of them has them in a real run."""
    import jax
    from jax.experimental import mesh_utils

    shape, names = tuple(program["mesh_shape"].values()), tuple(program["mesh_shape"])
    if not shape:
        return list(devices[:1])
    if math.prod(program["dcn_shape"]) == 1:
        return list(jax.make_mesh(shape, names, devices=devices).devices.flat)
    within = [size // slices for size, slices in zip(shape, program["dcn_shape"], strict=True)]
    # As ``jax.make_mesh`` does, for one slice.
    may_split = "v5 lite" in devices[0].device_kind
    mesh = mesh_utils.create_hybrid_device_mesh(
        within, program["dcn_shape"], devices, allow_split_physical_axes=may_split
    )
    return list(mesh.flat)


def answer_to(wanted: DevicesWanted, requests: BinaryIO) -> Answer:
    """Compiles the program that follows for the devices that are wanted."""
    step: Literal["devices", "mesh", "compile"] = "devices"
    try:
        devices = absent_devices(wanted)
        program: Program = pickle.load(requests)
        threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
        step = "mesh"
        devices = mesh_devices(program, devices)
        step, start = "compile", time.perf_counter()
        compiler_api = _compiler_api()
        compiled = compiler_api.compile_bytecode(program["bytecode"], devices, program["options"])
    except EOFError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        kind = devices[0].device_kind if step == "compile" else ""
        return {"failed": step, "message": message, "device_kind": kind}
    return {
        "module": compiler_api.module_to_bytes(compiled.module),
        "memory": dataclasses.asdict(compiled.memory),
        "device_kind": devices[0].device_kind,
        "slice_of": compiler_api.slices_of(devices),
        "seconds": time.perf_counter() - start,
    }


def _compiler_api() -> Any:
    """The module beside this one, without the package around it."""
    path = pathlib.Path(__file__).with_name("compiler_api.py")
    spec = importlib.util.spec_from_file_location("compiler_api", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _end_with_parent(requests: BinaryIO) -> None:
    """Ends this process when the one that asked ends, however it does, or closes the pipe."""
    requests.read(1)
    os._exit(1)


def main() -> None:
    """Reads what is wanted and answers it."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What compilers print is not part of the answer.
    try:
        wanted: DevicesWanted = pickle.load(requests)
        sys.path[:] = wanted["search_path"]
        answer = answer_to(wanted, requests)
    except EOFError:
        return  # Nobody waits for the answer any more.
    pickle.dump(answer, answers)
    answers.close()
    sys.stderr.flush()
    os._exit(0)  # Threads of compilers are not waited for.


if __name__ == "__main__":
    main()
