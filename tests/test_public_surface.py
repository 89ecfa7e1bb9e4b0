"""What importing the package costs, what it offers, and how its modules may import each other."""

import functools
import pathlib
import subprocess
import sys

import penzai_shard

ROOT = pathlib.Path(penzai_shard.__file__).parent.parent


def run_python(code):
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:penzai_shard", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_importing_the_package_loads_no_optional_dependency_and_starts_no_device():
    done = run_python(
        "import sys, penzai_shard\n"
        "optional = ('optax', 'orbax', 'rich', 'grain', 'transformers', 'torch', 'flax')\n"
        "loaded = [name for name in optional if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_needs_no_optional_dependency():
    done = run_python(
        "import sys\n"
        "for name in ('optax', 'orbax', 'rich', 'orbax.checkpoint'):\n"
        "    sys.modules[name] = None\n"
        "import jax\n"
        "from penzai import pz\n"
        "from penzai_shard import make_plan\n"
        "mesh = jax.sharding.AbstractMesh((4, 2), ('data', 'model'))\n"
        "sys.stdout.isatty = lambda: True\n"
        "print(make_plan({'w': pz.nx.ones({'a': 8})}, mesh, {'a': 'data'}))\n"
    )
    assert done.returncode == 0, done.stderr
    assert "a=8/data" in done.stdout
    assert "each device holds 8 B" in done.stdout


def test_every_public_name_is_there_once_and_documented():
    names = penzai_shard.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(penzai_shard, name).__doc__, name


def test_the_first_line_of_a_property_has_no_colon():
    """Sphinx takes what stands before it for the property's type."""
    classes = [each for each in vars(penzai_shard).values() if isinstance(each, type)]
    assert penzai_shard.ShardingPlan in classes
    for each in classes:
        for name, member in vars(each).items():
            if isinstance(member, property | functools.cached_property):
                assert ":" not in (member.__doc__ or "").partition("\n")[0], (each, name)


def test_the_documentation_of_root_says_what_it_is():
    assert penzai_shard.ROOT.__doc__ == "The whole model, as a place for an edit."


def test_imports_go_down_the_level_table():
    done = run_python(
        "import sys\n"
        "from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(no_cache=True, no_logo=True))\n"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
