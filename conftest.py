"""Eight simulated CPU devices for every test, chosen before JAX starts; tables 100 wide."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(
            flag
            for flag in os.environ.get("XLA_FLAGS", "").split()
            if "xla_force_host_platform_device_count" not in flag
        ),
        "--xla_force_host_platform_device_count=8",
    ]
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The width of every table and console that is not given one, whatever terminal the tests run in.
os.environ["COLUMNS"] = "100"

# Before any module is collected for its doctests, which would otherwise be imported a second time
# if it is named first, with classes of its own.
import penzai_shard  # noqa: F401
