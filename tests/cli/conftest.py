"""A shell in a folder with a program of one's own, for the tests of commands."""

import sys

import pytest

from penzai_shard.cli.main import main

PROGRAM = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from penzai import pz
import penzai_shard as pzs

def build(width=4):
    return pz.nn.Linear.from_config("l", jax.random.key(0), {"in": 8}, {"out": width})

def state():
    import optax
    return pzs.TrainState.initial_state(build(), optax.adam(1e-2), jax.random.key(0))

def called(names=("batch", "in")):
    return build(), pz.nx.ones(dict(zip(names, (4, 8))))

def plain():
    return {"w": jax.numpy.zeros((4, 2))}

def matmul(rows=64):
    mesh = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
    laid_out = lambda *spec: NamedSharding(mesh, P(*spec))
    a = jax.ShapeDtypeStruct((rows, 128), "float32", sharding=laid_out(None, "model"))
    b = jax.ShapeDtypeStruct((128, 32), "float32", sharding=laid_out("model"))
    return jax.jit(lambda a, b: a @ b, out_shardings=laid_out()), (a, b)

def alone():
    def alone_step(a):
        return a
    return jax.jit(alone_step)

def swapped():
    return matmul()[::-1]

def of_width(width):
    return build(width)

def by_keyword():
    step, (a, b) = matmul()
    return step, (a,), {"b": b}
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with ``own.py``: its exit status and what it prints."""
    (tmp_path / "own.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        try:
            status = main(list(arguments))
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
