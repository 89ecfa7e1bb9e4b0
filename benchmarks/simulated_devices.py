"""Eight simulated devices, if nothing else was said: importing this is enough.

JAX reads the flag when it first looks for devices, so this may stand anywhere among the imports.
"""

import os

_FLAG = "--xla_force_host_platform_device_count"

if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8"
