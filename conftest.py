"""Eight simulated CPU devices for every test, chosen before JAX is imported; tables 100 wide."""

import atexit
import gc
import importlib.metadata
import importlib.util
import os
import tempfile

import hypothesis

# Most of the tests' time is compilation. The older of XLA's two ways to write fused operations
# compiles a train step in half of the time, and one module in place of 32 in four fifths of that;
# later releases lack such flags, and end a process that names one. Devices of a busy machine get
# their turn late: after 40 seconds XLA gives up.
_FLAGS = ["--xla_cpu_collective_call_terminate_timeout_seconds=300"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
# Of a flag that is named twice the last counts: flags of the environment win, but for the devices.
_FLAGS += [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)
os.environ["JAX_PLATFORMS"] = "cpu"
# One operation gets slower code; what XLA does to whole programs, and collectives, are the same.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["COLUMNS"] = "100"

# What one process has compiled is read by the others, and by those that tests start. A folder that
# the environment names is kept for the next run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="penzai_shard_tests_", ignore_cleanup_errors=True)
    atexit.register(_cache.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# The same examples in every run, however slow the machine is.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")

# Tracing makes many small objects and little garbage: with Python's own numbers the collector takes
# a tenth of the time.
gc.set_threshold(50_000, 10, 10)

# The doctests of a module are found by importing it, and this one imports torch.
collect_ignore = [] if importlib.util.find_spec("torch") else ["penzai_shard/readers/torch.py"]
