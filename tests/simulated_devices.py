"""What XLA is asked for in the new processes of tests: simulated devices, and fast compilation."""

import importlib.metadata

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
# Code for fused operations in the older of XLA's two ways: a train step is compiled in less than
# half of the time, with the same collectives, and temporaries that differ by less than 0.01%. Later
# releases have no such flag, and end a process that names it.
OLDER_FUSIONS = (
    "--xla_cpu_use_fusion_emitters=false"
    if importlib.metadata.version("jaxlib").startswith("0.10.")
    else ""
)
EIGHT_DEVICES_FAST = f"{EIGHT_DEVICES} {OLDER_FUSIONS}".strip()
