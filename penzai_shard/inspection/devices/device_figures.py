"""What is known of kinds of devices, also of those that are not there."""

import dataclasses
import re
from typing import Any

_GIB = 2**30
_GB = 10**9

_TPU_SOURCE = "what libtpu's compiler leaves to programs"
_GPU_SOURCE = "three quarters of its memory, which JAX takes by default"


@dataclasses.dataclass(frozen=True)
class DeviceFigures:
    """What is known of a kind of device.

    Attributes:
        memory: How much of its memory a program of JAX can have, in bytes.
        source: Where that figure is from.
    """

    memory: int
    source: str


# By ``device_kind``, for one JAX device, which is half a chip of v2, v3 and 7x. As libtpu 0.0.42
# says of too large a program for each: "exceeds available HBM (15.75G)". Of v4 with one device per
# chip (chip_config_name="megacore"), which is how JAX runs there.
_TPU_MEMORY_IN_GIB = {
    "TPU v2": 7.48,
    "TPU v3": 15.48,
    "TPU v4": 30.75,
    "TPU v5 lite": 15.75,
    "TPU v5e": 15.75,
    "TPU v5": 95.74,
    "TPU v5p": 95.74,
    "TPU v6 lite": 31.25,
    "TPU v6e": 31.25,
    "TPU7x": 94.75,
}

# From NVIDIA's data sheets, in units of 10^9 bytes, which the devices have at least. Their names
# are those of CUDA, such as "NVIDIA A100-SXM4-40GB"; the first pattern that is found counts. JAX'
# share: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_GPU_MEMORY_IN_GB = {
    r"\bB200\b": 180,
    r"\bH200\b": 141,
    r"\bGH200\b": 96,
    r"\bH100 NVL\b": 94,
    r"\bH100\b": 80,
    r"\bA100\b.*\b80GB": 80,
    r"\bA100\b": 40,
    r"\bL40S?\b": 48,
    r"\bL4\b": 24,
    r"\bA10G?\b": 24,
    r"\bV100\b.*\b32GB": 32,
    r"\bV100\b": 16,
    r"\bT4\b": 16,
}
GPU_SHARE = 0.75
"""The part of a GPU's memory that JAX takes by default."""


def device_figures(kind: str) -> DeviceFigures | None:
    """What is known of a kind of device; None if nothing is.

    Args:
        kind: As JAX names it: ``jax.devices()[0].device_kind``.

    >>> device_figures("TPU v5 lite").memory / 2**30
    15.75
    >>> device_figures("cpu") is None
    True
    """
    if kind in _TPU_MEMORY_IN_GIB:
        return DeviceFigures(int(_TPU_MEMORY_IN_GIB[kind] * _GIB), _TPU_SOURCE)
    for pattern, size in _GPU_MEMORY_IN_GB.items():
        if re.search(pattern, kind):
            return DeviceFigures(int(size * _GB * GPU_SHARE), _GPU_SOURCE)
    return None


def memory_limit_of(device: Any) -> int | None:
    """How much memory programs have on a device that is there, in bytes, if it says so."""
    try:
        stats = device.memory_stats()
    except RuntimeError:
        # Devices of other processes, and those that are only described, say nothing.
        return None
    return None if stats is None else stats.get("bytes_limit")
