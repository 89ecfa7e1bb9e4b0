"""Sends texts between the processes of a job.

They go through the key-value store of the coordination service that ``jax.distributed.initialize``
starts, not through devices. JAX keeps its client in ``jax._src.distributed`` (jax 0.10.2):
https://github.com/jax-ml/jax/blob/main/jax/_src/distributed.py
"""

import math
import os
import time
from typing import Any

import jax
from jax._src import clusters, distributed

from penzai_shard.errors import Problem, ShardingError

# Python takes notice of Ctrl-C only between two calls of the client.
_SECONDS_PER_CALL = 1.0
# A shorter call may end before the answer of a busy service is back.
_LEAST_SECONDS = 0.1


def send(key: str, text: str) -> None:
    """Leaves a text under a key for the other processes.

    Args:
        key: A new key; pieces parted by slashes.
        text: The text; 30 MiB take a second.

    Raises:
        ShardingError: There is no coordination service.
    """
    _client().key_value_set(key, text)


def receive(key: str, seconds: float) -> str | None:
    """Waits for the text that some process leaves under a key.

    Args:
        key: The key.
        seconds: How long to wait.

    Returns:
        The text, or None if it did not come in time.

    Raises:
        ShardingError: There is no coordination service.
        jax.errors.JaxRuntimeError: The service has gone.
    """
    client = _client()
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        wait = max(_LEAST_SECONDS, min(left, _SECONDS_PER_CALL))
        try:
            return str(client.blocking_key_value_get(key, math.ceil(1000 * wait)))
        except jax.errors.JaxRuntimeError:
            # One class of error says both that the text is late and that the service has gone. Only
            # in the second case does this call fail too.
            client.key_value_dir_get(key)
        if left <= _SECONDS_PER_CALL:
            return None


def forget(key: str) -> None:
    """Removes the texts under a key and below it, which would stay in the first process' memory."""
    _client().key_value_delete(key)


def is_cluster() -> bool:
    """Whether ``jax.distributed.initialize`` finds out by itself of which job this process is."""
    environments = [env for env in clusters.ClusterEnv._cluster_types if not env.opt_in_only_method]
    is_given = "JAX_COORDINATOR_ADDRESS" in os.environ
    return is_given or any(environment.is_env_present() for environment in environments)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        what = f"{jax.process_count()} processes have no coordination service"
        fix = "Call jax.distributed.initialize() in each, before anything else of JAX."
        raise ShardingError("processes cannot agree:", [Problem("", what, fix)])
    return client
