"""Eight simulated CPU devices for every test, chosen before JAX starts; tables 100 wide."""

import atexit
import gc
import os
import pathlib
import signal
import tempfile
from collections.abc import Iterator

from tests.simulated_devices import (
    EIGHT_DEVICES,
    UNFINISHED_ENTRY,
    fast,
    ignore_unfinished_entries,
    users_fusions,
)

os.environ["JAX_PLATFORMS"] = "cpu"
# Fused operations get other code than those of users: see tests.simulated_devices.
os.environ["XLA_FLAGS"] = fast(
    " ".join(
        [
            *(
                flag
                for flag in os.environ.get("XLA_FLAGS", "").split()
                if "xla_force_host_platform_device_count" not in flag
            ),
            EIGHT_DEVICES,
        ]
    )
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Each program runs a few times: compiling it costs more than running it. What XLA does to whole
# programs, their collectives and temporaries are the same; its code for one operation is slower.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Bytecode of the package is written, as Python does unless it is told otherwise: without it each of
# the many processes that tests start compiles the whole package, in half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The width of every table and console that is not given one, whatever terminal the tests run in.
os.environ["COLUMNS"] = "100"

# Many tests compile the same programs, in both processes and in those that they start: what one
# has compiled is read by the others. A folder of your own, named in the environment, keeps it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="penzai_shard_tests_", ignore_cleanup_errors=True)
    atexit.register(_cache.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ["PYTHONWARNINGS"] = ",".join(
    filter(None, [os.environ.get("PYTHONWARNINGS"), UNFINISHED_ENTRY])
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Before any module is collected for its doctests, which would otherwise be imported a second time
# if it is named first, with classes of its own.
import hypothesis
import jax
import pytest

import penzai_shard  # noqa: F401

ignore_unfinished_entries()
# A shell has programs in the background ignore Ctrl-C, and so all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, however slow the machine is: what fails was broken by a change.
# --hypothesis-profile=others draws other ones.
hypothesis.settings.register_profile(
    "others", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "tests", hypothesis.settings.get_profile("others"), derandomize=True
)
hypothesis.settings.load_profile("tests")

# Tracing makes many small objects and little garbage, and JAX looks through all of its arrays at
# each collection. With Python's own numbers, collections take a tenth of the time.
gc.set_threshold(50_000, 10, 10)


@pytest.fixture(scope="module")
def compiled_as_by_users() -> Iterator[None]:
    """With XLA's optimisations and fusions as users have them, also for what rounds closely."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    with users_fusions():
        yield
    jax.config.update(name, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, so that at the end no process waits half a minute for another."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


_running: pathlib.Path | None = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keeps the garbage collector from going through what earlier files of tests have left.

    That is all that JAX has traced and compiled: it took a sixth of the time of the tests.
    """
    global _running
    if item.path != _running:
        _running = item.path
        gc.collect()
        gc.freeze()
