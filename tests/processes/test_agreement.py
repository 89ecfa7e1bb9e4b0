"""Agreements of one process, as far as no example shows them; ``test_two_processes`` has two."""

import pytest

from penzai_shard.processes.agreement import together


def test_together_leaves_the_error_of_one_process_as_it_is():
    error = KeyError("w")
    with pytest.raises(KeyError) as caught, together("outer"), together("inner"):
        raise error
    assert caught.value is error
    assert vars(error) == {}
