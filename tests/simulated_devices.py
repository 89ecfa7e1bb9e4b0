"""What XLA is asked for in tests and in the processes that they start: fast compilation.

Named here is all in which tests do not compile as users do.
"""

import contextlib
import importlib.metadata
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
# For `compile(compiler_options=...)`: the code for fused operations that users get.
USERS_FUSIONS = {"xla_cpu_use_fusion_emitters": True} if OLDER_FUSIONS else {}


def fast(flags: str) -> str:
    """XLA flags with those that compile fast; what they say of it themselves is left alone."""
    own = [flag for flag in (OLDER_FUSIONS, ONE_PIECE) if flag.partition("=")[0] not in flags]
    return " ".join([*flags.split(), *filter(None, own)])


EIGHT_DEVICES_FAST = fast(EIGHT_DEVICES)


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
