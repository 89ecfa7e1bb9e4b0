"""What the benchmark of pricing says of a process is of that process and of those it started."""

import pytest

from benchmarks.pricing import measured

USES_100_MB = "import time; x = bytearray(100_000_000); print(time.process_time())"


def test_peak_memory_is_that_of_the_largest_process():
    in_a_child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{USES_100_MB}'])"
    small, large = measured(["-c", "print(1)"]), measured(["-c", in_a_child])
    assert small.output == "1\n"
    assert large.peak > 100_000_000
    assert small.processor > 0
    assert large.processor > float(large.output)


def test_a_contender_that_fails_is_no_figure():
    with pytest.raises(RuntimeError, match="ended with 3"):
        measured(["-c", "raise SystemExit(3)"])
