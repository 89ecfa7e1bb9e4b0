"""Arrays of one process; those of two are in ``test_two_processes``."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from penzai_shard.processes.arrays import put


def test_put_is_one_device_put(monkeypatch):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    rows, whole = NamedSharding(mesh, jax.P("data")), NamedSharding(mesh, jax.P())
    arrays, shardings = [np.arange(4.0), jax.random.key(0), 1.5], [rows, whole, whole]
    calls = []
    monkeypatch.setattr(jax, "device_put", lambda *args: calls.append(args) or args[0])
    assert put(arrays, shardings) == arrays
    assert calls == [(arrays, shardings)]
