"""The form of a program, compared with what XLA propagates itself; names, lines, ties."""

import json
import os
import subprocess
import sys

import jax
import pytest

from penzai_shard.propagation.flat import propagate_lowered
from tests.propagation.programs import array, lower, undecided

# The others are squares, which are products there. Of the loop without constraints 131 of 131 are
# alike; 60 if broadcasts stay as they are, 93 if loops capture nothing, 128 without post-order.
LEAST_ALIKE = 0.99


def test_layouts_of_train_steps_are_those_that_xla_writes_down():
    # What is read from JAX's cache is not compiled, so that XLA writes nothing down.
    settings = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "tests.propagation.xla_dump"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6
    assert {n: alike / of for n, (of, alike, _) in found.items() if alike < LEAST_ALIKE * of} == {}
    assert all(are_equal for *_, are_equal in found.values())


def test_operations_of_a_call_have_its_name_and_the_users_line():
    inner = jax.jit(lambda y: jax.lax.sin(y) + 1)
    program = propagate_lowered(lower(lambda x: inner(inner(x)), array("data")))
    sines = [each for each in program.operations if each.kind == "stablehlo.sine"]
    assert [each.name for each in sines] == ["jit(<lambda>)/jit(<lambda>)/sin"] * 2
    assert all(os.path.basename(__file__) in str(each.location) for each in sines)
    assert sines[0].order < sines[1].order


def test_dead_operations_go_and_ties_stay():
    # Later releases of JAX have no ties.
    ties = pytest.importorskip("jax.experimental.shard_alike")

    def tied(x, y):
        jax.lax.cos(x)
        return ties.shard_alike(jax.lax.sin(x), jax.lax.tan(y))

    program = propagate_lowered(lower(tied, array("data"), undecided()))
    assert [program.values[n].spec for n in program.results] == [(("data",), ())] * 2
    assert "stablehlo.cosine" not in {each.kind for each in program.operations}
