"""What importing the package costs, what it offers, and how its modules may import each other."""

import functools
import pathlib
import subprocess
import sys

import pytest

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


NO_READER_IS_LOADED = (
    "from penzai_shard.readers.announcements import OWN_READERS\n"
    "loaded = [r for r in OWN_READERS.values() if r.partition(':')[0] in sys.modules]\n"
    "assert not loaded, loaded\n"
)


def test_importing_and_planning_loads_no_optional_dependency_nor_first_api_and_starts_no_device():
    done = run_python(
        "import jax, sys, penzai_shard, penzai_shard.layers, penzai_shard.training\n"
        "from penzai import pz\n"
        "mesh = jax.sharding.AbstractMesh((2,), ('data',))\n"
        "array = pz.nx.NamedArray({'a': 2}, jax.ShapeDtypeStruct((2,), float))\n"
        "penzai_shard.make_plan([array], mesh, {'a': 'data'})\n"
        "from penzai_shard.readers import reader_of\n"
        "assert reader_of(type('Other', (), {})()) is None\n"
        "optional = ('optax', 'orbax', 'rich', 'grain', 'transformers', 'torch', 'flax')\n"
        "optional += ('equinox', 'haliax')\n"
        "loaded = [name for name in optional if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        f"{NO_READER_IS_LOADED}"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "from penzai_shard.model_variables import first_api, is_variable\n"
        "assert first_api.parameter_types() == () == first_api.sensitive_layer_types()\n"
        "assert not is_variable(1)\n"
        "assert not any(name.startswith('penzai.deprecated') for name in sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr


LIBRARIES_OF_MODELS = ("flax", "equinox", "haliax", "torch")


def test_a_model_of_penzai_needs_no_other_library_and_loads_no_reader():
    """Where none of them is installed: planned, initialised, trained, saved and restored."""
    done = run_python(
        "import sys, tempfile\n"
        f"libraries = {LIBRARIES_OF_MODELS}\n"
        "sys.modules.update(dict.fromkeys(libraries))\n"
        "import jax, optax\n"
        "from penzai import pz\n"
        "import penzai_shard as pzs\n"
        "mesh = pzs.make_mesh({'data': len(jax.devices())})\n"
        "def build(key):\n"
        "    return pz.nn.Linear.from_config('l', key, {'a': 8}, {'b': 2})\n"
        "def loss_fn(model, rng, state, x):\n"
        "    return model(x).untag('b').mean(), state, {}\n"
        "plan = pzs.make_plan(pzs.abstract_model(build, jax.random.key(0)), mesh, {'a': 'data'})\n"
        "model = pzs.sharded_init(build, jax.random.key(0), plan=plan)\n"
        "state = pzs.TrainState.initial_state(model, optax.sgd(0.1), jax.random.key(1))\n"
        "state, _ = pzs.build_train_step_fn(loss_fn)(state, x=pz.nx.ones({'a': 8}))\n"
        "path = pzs.save_params(tempfile.mkdtemp() + '/saved', state.model)\n"
        "pzs.restore_params(path, plan=plan, model=pzs.abstract_model(build, jax.random.key(0)))\n"
        "assert not any(map(sys.modules.get, libraries))\n"
        f"{NO_READER_IS_LOADED}"
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def without_optional_dependencies():
    """What is printed where none of them can be imported: a plan, and who misses them."""
    done = run_python(
        "import sys\n"
        f"libraries = {LIBRARIES_OF_MODELS}\n"
        "for name in ('optax', 'orbax', 'rich', 'orbax.checkpoint', *libraries):\n"
        "    sys.modules[name] = None\n"
        "import jax, penzai_shard\n"
        "from penzai import pz\n"
        "from penzai_shard.surgery.references import resolve\n"
        "mesh = jax.sharding.AbstractMesh((4, 2), ('data', 'model'))\n"
        "sys.stdout.isatty = lambda: True\n"
        "print(penzai_shard.make_plan({'w': pz.nx.ones({'a': 8})}, mesh, {'a': 'data'}))\n"
        "for name in libraries:\n"
        "    def build():\n"
        "        __import__(name)\n"
        "    try:\n"
        "        penzai_shard.abstract_model(build)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error, *error.__notes__)\n"
        "    try:\n"
        "        resolve(name + '.nn:Linear')\n"
        "    except penzai_shard.errors.RuleTypeError as error:\n"
        "        print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_builder_whose_library_is_missing_is_told_the_extra_that_installs_it(
    without_optional_dependencies,
):
    for name in LIBRARIES_OF_MODELS:
        said = f"Install it with: pip install 'penzai-shard[{name}]'"
        assert without_optional_dependencies.count(said) == 2


def test_a_plan_needs_no_optional_dependency(without_optional_dependencies):
    assert "a=8/data" in without_optional_dependencies
    assert "each device holds 8 B" in without_optional_dependencies


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
