"""A mistake in a call: exit status 2, and an error without a traceback that says what to write."""

import pytest

from tests.cli import test_choose, test_price

FILES = test_choose.FILES | test_price.FILES | {"wrong.py": "import absent"}
CHOOSE = test_choose.CALL


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        ("plan model.py:biuld --mesh data=4", "model.py:build"),
        ("plan modle.py:build --mesh data=4", "path of a file"),
        ("plan model.py:build --mesh 4x2", "--mesh data=4,model=2"),
        ("plan model.py:build --mesh data=4 --rules embed", "--rules embedding=data"),
        ("plan model.py:build --mesh data=4 --rules embedding=dta", "Write 'data'"),
        ("plan llama-3-7b --mesh data=4", "or one of gemma-2-9b, "),
        # The code of a user, which may fail in any way.
        ("plan wrong.py:build --mesh data=4", "No module named 'absent'. Add --debug"),
        ("plan model.py:loss_fn --mesh data=4", "'model', 'rng', 'state', and 'tokens'"),
        ("plan model.py:build --mesh data=0", "{'data': 4}"),
        ("plan job.py --mesh data=4", "job.py:build"),
        ("lint model.py:built --mesh data=4", "model.py:build"),
        ("lint model.py:build --mesh data=4 --batch wrong.py:batch", "No module"),
        (f"{CHOOSE} --devices v5f:4", "'v5e:32'"),
        (f"{CHOOSE} --optimizer adamww", "adamw"),
        (f"{CHOOSE} --keep nurons=", "neurons"),
        (f"{CHOOSE} --optimizer contrib", "not callable"),
        ("price job.py:number", "compile_step("),
        ("price job.py:build --json /proc/lock.json", "/proc/lock.json"),
        ("price model.py:loss_fn", "Add --debug"),
        ("price job.py:bild", "job.py:build"),
        ("bill absent.json absent.json", "price --json"),
    ],
)
def test_mistake_says_what_to_write(run, call, fix):
    status, out, error = run(*call.split())
    assert (status, out) == (2, "")
    assert fix in error
    assert "Traceback" not in error
