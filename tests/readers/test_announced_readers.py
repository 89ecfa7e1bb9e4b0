"""Readers of packages of somebody else's, found by their entry points."""

import importlib
import re
import sys
import textwrap
import tomllib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core.meta import Partitioned

import penzai_shard as pzs
from penzai_shard.errors import PlanError, RuleTypeError, ShardingError, ShardingWarning
from penzai_shard.named_leaves import leaves_of
from penzai_shard.readers import announcements

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("**A reader of another library's")[1]
EXAMPLE = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL).group(1)
DECLARED = tomllib.loads(re.search(r"```toml\n(.*?)```", SECTION, re.DOTALL).group(1))

LIBRARY = """
    import jax

    @jax.tree_util.register_pytree_node_class
    class Array:
        def __init__(self, values, labels):
            self.values, self.labels = values, tuple(labels)

        def tree_flatten(self):
            return (self.values,), self.labels

        @classmethod
        def tree_unflatten(cls, labels, children):
            return cls(*children, labels)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs packages, each a module and what it announces, as pip would."""
    modules = dict(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def install(package, entries, **sources):
        for module, source in sources.items():
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[penzai_shard.readers]", *lines]))
        importlib.invalidate_caches()
        announcements.announcements.cache_clear()

    yield install
    announcements.announcements.cache_clear()
    announcements._loaded.cache_clear()
    announcements._warned.clear()
    for name in set(sys.modules) - set(modules):
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def labelled(install):
    """The library and the reader of CONTRIBUTING's example."""
    entries = DECLARED["project"]["entry-points"]["penzai_shard.readers"]
    install("labelled-reader", entries, labelled=LIBRARY, labelled_reader=EXAMPLE)
    return importlib.import_module("labelled")


def test_a_reader_is_loaded_once_its_library_was_imported(install):
    install("labelled-reader", {"labelled": "labelled_reader:READER"}, labelled=LIBRARY)
    # Its module does not exist, and nobody asks for it.
    pzs.make_plan({"w": jnp.ones(2)}, pzs.make_mesh({"data": 8}), {}, on_unnamed="replicate")
    assert "labelled_reader" not in sys.modules


def test_arrays_of_the_example_are_planned_placed_trained_and_saved(labelled, tmp_path):
    def build(key):
        return {"w": labelled.Array(jax.random.normal(key, (8, 4)), ("embed", "mlp"))}

    def loss_fn(model, rng, state, x):
        assert model["w"].labels == ("embed", "mlp")
        part = x.values @ model["w"].values
        return jnp.mean(part**2), state, {"part": labelled.Array(part, ("batch", "mlp"))}

    mesh = pzs.make_mesh({"data": 4, "model": 2})
    rules = {"embed": "data", "mlp": "model", "batch": "data"}
    abstract = pzs.abstract_model(build, jax.random.key(0))
    assert [leaf.names for leaf in leaves_of(abstract)] == [("embed", "mlp")]
    model = pzs.sharded_init(build, jax.random.key(0), mesh=mesh, rules=rules)
    assert type(model["w"]) is labelled.Array
    assert model["w"].values.sharding.shard_shape((8, 4)) == (2, 2)
    assert pzs.place(model, mesh, {})["w"].values.is_fully_replicated

    x = labelled.Array(jnp.arange(64.0).reshape(8, 8), ("batch", "embed"))
    batch = pzs.shard_batch({"x": x}, mesh, {"batch": "data"})
    assert batch["x"].values.sharding.shard_shape((8, 8)) == (2, 8)
    state = pzs.TrainState.initial_state(model, optax.sgd(1e-4), jax.random.key(1))
    step = pzs.build_train_step_fn(loss_fn, accumulate_steps=2)
    state, aux = step(state, **batch)
    assert aux["part"].labels == ("batch", "mlp")
    assert np.allclose(aux["part"].values, x.values @ model["w"].values, rtol=1e-5)

    path = pzs.save_params(tmp_path / "saved", state.model)
    restored = pzs.restore_params(path, abstract, mesh, {"embed": "model"})
    assert restored["w"].labels == ("embed", "mlp")
    assert restored["w"].values.sharding.shard_shape((8, 4)) == (4, 4)
    assert (restored["w"].values == state.model["w"].values).all()
    with pytest.raises(PlanError, match=r"w: logical axis 'mlp' \(4\) does not divide"):
        pzs.make_plan(abstract, pzs.make_mesh({"model": 8}), {"mlp": "model"})


def test_a_type_that_jax_cannot_look_into_is_refused_with_its_path(labelled, tmp_path):
    class Leaf(labelled.Array):  # Registered types do not pass this on.
        pass

    tree = {"parts": [Leaf(jnp.ones((8, 4)), ("embed", "mlp"))]}
    mesh = pzs.make_mesh({"data": 8})
    uses = [
        lambda: pzs.make_plan(tree, mesh, {"embed": "data"}),
        lambda: pzs.place(tree, mesh, {"embed": "data"}),
        lambda: pzs.sharded_init(lambda: tree, mesh=mesh, rules={}),
        lambda: pzs.abstract_model(lambda: tree),
        lambda: pzs.TrainState.initial_state(tree, optax.sgd(0.1), jax.random.key(0)),
        lambda: pzs.save_train_state(tmp_path / "state", tree),
        lambda: pzs.shard_batch(tree, mesh, {"embed": "data"}),
    ]
    for use in uses:
        with pytest.raises(
            ShardingError, match=r"parts/0: it is a Leaf, into which JAX cannot look. Register the"
        ):
            use()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("(node.values, node.labels)", "a tuple"),
        ("ReadArray(node.values, 'ab')", "a ReadArray with 'ab' as names"),
        ("ReadArray(node.values, ['a', 'b'])", r"a ReadArray with \['a', 'b'\] as names"),
    ],
)
def test_a_reader_that_gives_something_else_is_named(install, given, text):
    source = EXAMPLE.replace("ReadArray(node.values, node.labels)", given)
    entries = {"labelled": "labelled_reader:READER"}
    install("their-package", entries, labelled=LIBRARY, labelled_reader=source)
    labelled = importlib.import_module("labelled")
    with pytest.raises(RuleTypeError, match=rf"labelled_reader.LabelledReader.read gave {text}\. "):
        leaves_of([labelled.Array(jnp.ones((2, 3)), "ab")])


BROKEN = {
    "raises": ("reader_module:READER", "1 / 0", "ZeroDivisionError: division by zero"),
    "lacks a library": (
        "reader_module:READER",
        "import no_such_library",
        "ModuleNotFoundError: No module named 'no_such_library'",
    ),
    "has no module": ("nowhere:READER", "", "ModuleNotFoundError: No module named 'nowhere'"),
    "has no such name": ("reader_module:READER", "", "AttributeError: .*'READER'"),
    "is something else": ("reader_module:READER", "READER = 3", "is a int, not an ArrayReader"),
    "is a class": (
        "reader_module:LabelledReader",
        EXAMPLE,
        r"is a class. Refer to an instance of it: READER = LabelledReader\(\)",
    ),
    "is for another library": (
        "reader_module:READER",
        EXAMPLE.replace('library = "labelled"', 'library = "other"'),
        "says that it is for 'other'. Give both the same name",
    ),
}


@pytest.mark.parametrize(("reference", "source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_reader_is_named_with_its_package_and_stops_nothing_else(
    install, reference, source, reason
):
    install("their-package", {"labelled": reference}, labelled=LIBRARY, reader_module=source)
    labelled = importlib.import_module("labelled")

    class Other:
        pass

    mesh = pzs.make_mesh({"data": 8})
    with pytest.warns(ShardingWarning, match=f"of the package 'their-package', .*{reason}"):
        assert leaves_of({"other": Other()})[0].dtype is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Once is enough.
        pzs.make_plan({"w": jnp.ones(2)}, mesh, {}, on_unnamed="replicate")
    text = rf"cannot read a labelled.Array: the reader '{reference}' of the package 'their-package'"
    for options in ({}, {"on_unnamed": "replicate"}):
        with pytest.raises(RuleTypeError, match=f"{text}, for 'labelled', .*{reason}"):
            pzs.make_plan({"w": labelled.Array(jnp.ones(2), "a")}, mesh, {}, **options)
    with pytest.raises(RuleTypeError, match=r"pip uninstall their-package"):
        leaves_of([labelled.Array(jnp.ones(2), "a")])


def test_a_reader_that_fails_when_asked_fails_for_its_own_types_alone(install):
    source = EXAMPLE.replace("return issubclass(", "return no_such_name(")
    install(
        "their-package",
        {"labelled": "labelled_reader:READER"},
        labelled=LIBRARY,
        labelled_reader=source,
    )
    labelled = importlib.import_module("labelled")
    with pytest.warns(ShardingWarning, match=r"'their-package', .* fails when it is asked: Name"):
        assert leaves_of({"w": jnp.ones(2), "other": type("Other", (), {})()})
    with pytest.raises(RuleTypeError, match=r"'their-package', .* NameError: name 'no_such_name"):
        leaves_of([labelled.Array(jnp.ones(2), "a")])


def test_two_readers_of_one_type_are_refused_by_name(labelled, install):
    install("second-package", {"labelled": "again:READER"}, again=EXAMPLE)
    assert leaves_of({"w": jnp.ones(2)})
    with pytest.raises(
        RuleTypeError,
        match=r"type labelled.Array are read by the reader 'labelled_reader:READER' of the package "
        r"'labelled-reader' and by the reader 'again:READER' of the package 'second-package'\. Un",
    ):
        leaves_of([labelled.Array(jnp.ones(2), "a")])


def test_a_reader_of_types_that_we_read_ourselves_is_refused_by_name(install):
    source = """
        from penzai_shard.readers import flax_linen
        READER = type("Theirs", (type(flax_linen.READER),), {})()
    """
    install("their-package", {"flax.core.meta": "their_reader:READER"}, their_reader=source)
    box = type("Box", (Partitioned,), {})
    with pytest.raises(RuleTypeError, match=r"penzai_shard's own reader .* and by .*their-package"):
        leaves_of([box(jnp.ones(2), ("a",))])


def test_a_reader_that_takes_names_and_has_no_method_for_it_is_told_so(install):
    source = """
        from penzai_shard.readers import ArrayReader, ReadArray

        class Reader(ArrayReader):
            library = "labelled"
            takes_names = True

            def reads(self, node_type):
                return node_type.__name__ == "Array"

            def read(self, node):
                return ReadArray(node.values, None)

            def with_data(self, node, data):
                return type(node)(data, node.labels)

        READER = Reader()
    """
    install("half", {"labelled": "half_reader:READER"}, labelled=LIBRARY, half_reader=source)
    labelled = importlib.import_module("labelled")
    with pytest.raises(
        RuleTypeError,
        match=r"^half_reader\.Reader says takes_names = True and has no method "
        r"named\(node, names\)\. Give it one, or leave takes_names out\.$",
    ):
        pzs.name_axes({"w": labelled.Array(jnp.ones(2), "a")}, {"w": ("a",)})
