"""What vendors publish of their devices: speed, memory and links.

All figures are for one chip, or one GPU, and in one direction: pages that add up both directions of
a link are halved. What is not published is None, and no other figure is taken in its place.
"""

import dataclasses

_TERA = 1e12
_GIGA = 1e9
_GIGABIT = 1e9 / 8

_TPU_PAGES = "https://cloud.google.com/tpu/docs/"
_TPU_2020 = "Jouppi et al. 2020, A domain-specific supercomputer for training deep neural networks"
_TPU_2023 = "Jouppi et al. 2023, arXiv:2304.01433, table 4"
_GPU_PAGES = "https://www.nvidia.com/en-us/data-center/"
_DGX_PAGES = "https://docs.nvidia.com/dgx/"


@dataclasses.dataclass(frozen=True)
class PublishedFigures:
    """What is published of a kind of device, for one chip or GPU.

    Attributes:
        device_kind: As JAX names it: ``jax.devices()[0].device_kind``.
        flops: Dense peak in bfloat16, per second; of V100 and T4, which have no units for it, in
            float16.
        memory_bandwidth: Of its own memory, in bytes per second.
        link: In bytes per second and one direction: of a TPU one link to a neighbour, of a GPU all
            its links to the other GPUs of a host.
        network: What it has of the network between slices, or between hosts, in bytes per second
            and one direction; None where that is not published.
        sources: Pages and papers that say so.
        devices_per_host: Of GPUs, how many a host has that its vendor sells or describes; 0 of
            TPUs.
    """

    device_kind: str
    flops: float
    memory_bandwidth: float
    link: float
    network: float | None
    sources: tuple[str, ...]
    devices_per_host: int = 0


def _tpu(
    device_kind: str,
    teraflops: float,
    memory: float,
    link: float,
    network: float | None,
    *sources: str,
) -> PublishedFigures:
    """Of a TPU; GB/s for memory and link, Gbit/s for the network."""
    return PublishedFigures(
        device_kind,
        teraflops * _TERA,
        memory * _GIGA,
        link * _GIGA,
        None if network is None else network * _GIGABIT,
        sources,
    )


def _gpu(
    device_kind: str,
    teraflops: float,
    memory: float,
    link: float,
    network: float | None,
    *sources: str,
) -> PublishedFigures:
    """Of a GPU in hosts of eight; GB/s for memory and links, Gbit/s for the network."""
    figures = _tpu(device_kind, teraflops, memory, link, network, *sources)
    return dataclasses.replace(figures, devices_per_host=8)


PUBLISHED: dict[str, PublishedFigures] = {
    # Neither page nor paper says what the network between slices gives a chip of v2 to v4.
    "v2": _tpu("TPU v2", 46, 700, 496 / 8, None, _TPU_2020),
    "v3": _tpu("TPU v3", 123, 900, 70, None, _TPU_PAGES + "v3", _TPU_2023),
    "v4": _tpu("TPU v4", 275, 1200, 50, None, _TPU_PAGES + "v4", _TPU_2023),
    # 400 GB/s per chip in both directions, 4 links; 6.4 Tbit/s per pod of 256 chips.
    "v5e": _tpu("TPU v5 lite", 197, 819, 50, 25, _TPU_PAGES + "v5e"),
    # 1200 GB/s per chip in both directions, 6 links.
    "v5p": _tpu("TPU v5", 459, 2765, 100, 50, _TPU_PAGES + "v5p"),
    # 3200 Gbit/s per chip, 4 links; 25.6 Tbit/s per pod of 256 chips.
    "v6e": _tpu("TPU v6 lite", 918, 1600, 100, 100, _TPU_PAGES + "v6e"),
    # 1200 GB/s per chip in both directions, 6 links.
    "tpu7x": _tpu("TPU7x", 2307, 7380, 100, 100, _TPU_PAGES + "tpu7x"),
    # NVLink of 300 GB/s in both directions; 4 ports of 100 Gbit/s for 8 GPUs.
    "v100": _gpu(
        "Tesla V100-SXM2-16GB",
        125,
        900,
        150,
        50,
        _GPU_PAGES + "v100",
        _DGX_PAGES + "dgx1-user-guide",
    ),
    # NVLink of 600 GB/s in both directions; 8 ports of 200 Gbit/s.
    "a100": _gpu(
        "NVIDIA A100-SXM4-40GB",
        312,
        1555,
        300,
        200,
        _GPU_PAGES + "a100",
        _DGX_PAGES + "dgxa100-user-guide",
    ),
    "a100-80gb": _gpu(
        "NVIDIA A100-SXM4-80GB",
        312,
        2039,
        300,
        200,
        _GPU_PAGES + "a100",
        _DGX_PAGES + "dgxa100-user-guide",
    ),
    # The page gives 1,979 teraflops with sparsity; NVLink of 900 GB/s; 8 ports of 400 Gbit/s.
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3",
        989.5,
        3350,
        450,
        400,
        _GPU_PAGES + "h100",
        _DGX_PAGES + "dgxh100-user-guide",
    ),
    "h200": _gpu(
        "NVIDIA H200", 989.5, 4800, 450, 400, _GPU_PAGES + "h200", _DGX_PAGES + "dgxh100-user-guide"
    ),
    # 4.5 petaflops with sparsity, NVLink of 1.8 TB/s; 8 ports of 400 Gbit/s.
    "b200": _gpu(
        "NVIDIA B200",
        2250,
        8000,
        900,
        400,
        _GPU_PAGES + "dgx-b200",
        _DGX_PAGES + "dgxb200-user-guide",
    ),
    # 242 teraflops with sparsity. PCI Express of 64 and of 32 GB/s in both directions; the
    # network of their hosts is the host's, of which NVIDIA says nothing.
    "l4": _gpu("NVIDIA L4", 121, 300, 32, None, _GPU_PAGES + "l4"),
    "t4": _gpu("Tesla T4", 65, 320, 16, None, _GPU_PAGES + "tesla-t4"),
}
"""By the short name of the kind of device, as in ``"v5e:32"`` and ``"h100:16"``."""

# Of all simulated devices together in a second of one core of a server's processor (AMD EPYC with
# AVX-512), rounded. Other machines are faster or slower in all of it; which of two layouts is
# faster depends on ratios.
SIMULATED = PublishedFigures(
    "cpu", 120 * _GIGA, 7 * _GIGA, 10 * _GIGA, None, ("python -m benchmarks.simulated_hardware",)
)
"""What was measured of devices that JAX simulates on CPUs, of which nobody publishes anything."""
