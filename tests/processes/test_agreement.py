"""Agreements of one process, as far as no example shows them; ``test_two_processes`` has two."""

import pytest

from penzai_shard.errors import ShardingError
from penzai_shard.jax_internals import messages
from penzai_shard.processes.agreement import together


def test_message_needs_a_coordination_service():
    with pytest.raises(ShardingError):
        messages.send("key", "text")


def test_together_leaves_the_error_of_one_process_as_it_is():
    error = KeyError("w")
    with pytest.raises(KeyError) as caught, together("outer"), together("inner"):
        raise error
    assert caught.value is error
    assert vars(error) == {}
