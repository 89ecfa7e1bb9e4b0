"""Agreements of one process; those of two are in ``test_two_processes``."""

import pytest

from penzai_shard.errors import ShardingError
from penzai_shard.jax_internals import messages
from penzai_shard.processes.agreement import together


@pytest.mark.parametrize(
    "message", [lambda: messages.send("k", "text"), lambda: messages.receive("k", 1.0)]
)
def test_messages_need_a_coordination_service(message):
    with pytest.raises(ShardingError) as caught:
        message()
    assert "jax.distributed.initialize()" in caught.value.problems[0].fix


# Examples in the docstrings show the rest: any message of them would raise ShardingError here.


def test_together_leaves_the_error_of_one_process_as_it_is():
    error = KeyError("w")
    with pytest.raises(KeyError) as caught, together("outer"), together("inner"):
        raise error
    assert caught.value is error
    assert vars(error) == {}
