"""Tests compile faster than users do: those that need it compile as users do nevertheless."""

import contextlib
import re

import jax
import jax.numpy as jnp

from tests.simulated_devices import (
    OLDER_FUSIONS,
    ONE_PIECE,
    PATIENCE,
    USERS_FUSIONS,
    fast,
    users_fusions,
)


def test_within_users_fusions_programs_are_those_of_users_and_others_before_and_after():
    asked = [
        (contextlib.nullcontext, {}),
        (users_fusions, {}),
        (contextlib.nullcontext, {}),
        (contextlib.nullcontext, USERS_FUSIONS),
    ]
    gradient_of_a_lookup = jax.grad(lambda table: (table[jnp.arange(32) % 5] ** 2).sum())
    programs = []
    for context, options in asked:
        with context():
            step = jax.jit(gradient_of_a_lookup).lower(jnp.ones((64, 64)))
            text = step.compile(compiler_options=options).as_text()
            programs.append(re.findall(r"= (\S+ [\w-]+)\(", text))
    before, within, after, of_users = programs
    assert len(within) > 5
    assert within == of_users
    assert before == after
    # Releases without the older fusions have one way alone.
    assert (within != before) is bool(OLDER_FUSIONS)


def test_choices_in_the_environment_are_kept():
    chosen = (
        "--xla_cpu_use_fusion_emitters=true --xla_cpu_parallel_codegen_split_count=32 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=20"
    )
    assert fast(chosen) == chosen
    added = [*OLDER_FUSIONS.split(), ONE_PIECE, PATIENCE]
    assert fast("--xla_dump_to=x").split() == ["--xla_dump_to=x", *added]
