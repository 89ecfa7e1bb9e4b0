"""The README's first command, as a process: what each numbered step says."""

import re
import subprocess
import sys

# With less training, which takes most of the time.
SCRIPT = """
import runpy
from penzai_shard.cli import demo
demo._STEPS = 30
runpy.run_module("penzai_shard", run_name="__main__")
"""


def test_demo_goes_from_a_plan_to_a_restore_on_another_mesh(tmp_path):
    command = [sys.executable, "-c", SCRIPT, "demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    steps = re.findall(r"^(\d)\. (.*)", done.stdout, re.M)
    assert [number for number, _ in steps] == ["1", "2", "3", "4", "5", "6"]
    texts = dict(steps)
    assert "on mesh (data=4, model=2)" in texts["1"]
    assert "P('model', 'data')" in texts["2"]
    first, last = map(float, re.findall(r"\d+\.\d+", texts["4"]))
    assert first > last + 1
    assert re.search(r"all \d\d arrays are equal", texts["6"])
    assert any(tmp_path.iterdir())
