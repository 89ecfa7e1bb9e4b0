"""What XLA is asked for in tests and in the processes that they start: fast compilation.

Named here is all in which tests do not compile and run as users do.
"""

import contextlib
import importlib.metadata
import types
import warnings
from collections.abc import Iterator

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
# Code for fused operations in the older of XLA's two ways: a train step is compiled in less than
# half of the time. Collectives are the same but for scatters, which become loops, and temporaries
# differ by less than 0.01%. Later releases have no such flag, and end a process that names it.
OLDER_FUSIONS = (
    "--xla_cpu_use_fusion_emitters=false"
    if importlib.metadata.version("jaxlib").startswith("0.10.")
    else ""
)
# The code of a program in one piece: for small programs, 32 pieces to be compiled at once are a
# tenth more work.
ONE_PIECE = "--xla_cpu_parallel_codegen_split_count=1"
# Of a machine that is busy with other things a device may get its turn late: after 40 seconds those
# that wait for it end the process.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
# Processes share what they compile, and JAX writes it into its place as it goes: one that reads too
# early, or what a process has left that was killed, warns, and compiles it itself.
_UNFINISHED = "Error reading persistent compilation cache entry"
# In PYTHONWARNINGS, of which the last that fits counts: Python forgets what -W repeats of it.
UNFINISHED_ENTRY = f"ignore:{_UNFINISHED}:UserWarning"
# For `compile(compiler_options=...)`: the code for fused operations that users get.
USERS_FUSIONS = {"xla_cpu_use_fusion_emitters": True} if OLDER_FUSIONS else {}


def fast(flags: str) -> str:
    """XLA flags with the tests' own; what they say of the same themselves is left alone."""
    own = [
        flag for flag in (OLDER_FUSIONS, ONE_PIECE, PATIENCE) if flag.partition("=")[0] not in flags
    ]
    return " ".join([*flags.split(), *filter(None, own)])


EIGHT_DEVICES_FAST = fast(EIGHT_DEVICES)


def ignore_unfinished_entries() -> None:
    """Has JAX say nothing of them in this process, whatever a test makes of warnings."""
    from jax._src import compiler

    def warn(message, *arguments, **options):
        if not message.startswith(_UNFINISHED):
            warnings.warn(message, *arguments, **options)

    compiler.warnings = types.SimpleNamespace(warn=warn)


@contextlib.contextmanager
def users_fusions() -> Iterator[None]:
    """What is compiled within has the code for fused operations that users get.

    Every program goes by the one function that this replaces, also those of threads.
    """
    import jax
    from jax._src import compiler

    asked = compiler.get_compile_options

    def with_users_fusions(*arguments, env_options_overrides=None, **options):
        overrides = USERS_FUSIONS | (env_options_overrides or {})
        return asked(*arguments, env_options_overrides=overrides, **options)

    jax.clear_caches()  # Of what other tests have compiled otherwise.
    compiler.get_compile_options = with_users_fusions
    try:
        yield
    finally:
        compiler.get_compile_options = asked
        jax.clear_caches()
