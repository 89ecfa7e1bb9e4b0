"""Arrays of one process; those of two are in ``test_two_processes``."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from penzai_shard.processes.arrays import put


def test_put_is_one_device_put(monkeypatch):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    rows, whole = NamedSharding(mesh, jax.P("data")), NamedSharding(mesh, jax.P())
    arrays = [np.arange(4.0), jnp.ones((2, 3), jnp.bfloat16), jax.random.key(0), 1.5]
    shardings = [rows, rows, whole, whole]
    expected = jax.device_put(arrays, shardings)

    calls, device_put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: calls.append(1) or device_put(*args))
    placed = put(arrays, shardings)
    assert len(calls) == 1
    assert [array.sharding for array in placed] == shardings
    assert [jax.typeof(array) for array in placed] == [jax.typeof(array) for array in expected]
    assert all(bool((array == other).all()) for array, other in zip(placed, expected, strict=True))
