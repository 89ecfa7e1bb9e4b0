"""The README's first command, as a process."""

import subprocess
import sys


def test_demo_plans_builds_edits_and_runs():
    done = subprocess.run(
        [sys.executable, "-m", "penzai_shard", "demo"], capture_output=True, text=True, check=True
    )
    assert "on mesh (data=4, model=2)" in done.stdout
    assert "out_linear.weights: P('model', 'data')" in done.stdout
    assert "lie as P('data', None, 'model')" in done.stdout
    assert "4 layers are inserted" in done.stdout
