"""Which stored array fills which wanted one: every difference is named, with a fix that works."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.matching import Options, match
from penzai_shard.checkpoints.records import ArrayRecord
from tests.checkpoints.trees import numbers, refused_kinds
from tests.refusals import problems_of, refused


def named(*axes, sizes=(4, 6, 2), dtype="float32", first=0):
    shape = sizes[: len(axes)]
    data = np.arange(np.prod(shape), dtype=dtype).reshape(shape) + np.asarray(first, dtype)
    return pz.nx.wrap(jnp.asarray(data), *axes)


REFUSAL = pzs.CheckpointMismatchError
W, BLOCKS = {"w": named("a", "b")}, {f"block_{i}/w": named("a", first=10 * i) for i in range(3)}
STACK = {"blocks/w": pz.nx.wrap(jnp.stack([numbers(b) for b in BLOCKS.values()]), "blocks", "a")}
KEY, RBG = {"k": jax.random.key(0)}, {"k": jax.random.key(0, impl="rbg")}
FOUR_BLOCKS = {"blocks/w": pz.nx.zeros({"blocks": 4, "a": 4})}
LONGER_BLOCK = {"block_2/w": named("a", sizes=(5,))}
BARE, TALL = {"w": jnp.ones((2, 3))}, {"w": jnp.ones((3, 2))}
# What is stored, what is wanted, and the kinds of the problems by path. Those that have a fix are
# among the drawn mistakes.
DIFFERENCES = {
    "no names": (BARE, TALL, {"w": "sizes"}),
    "names on one side": (W, {"w": numbers(W["w"])}, {"w": "axes"}),
    "key": (KEY, RBG, {"k": "key"}),
    "key and numbers": (KEY, {"k": jnp.zeros(2, "uint32")}, {"k": "key axes"}),
    "fewer blocks": (STACK, {"block_0/w": BLOCKS["block_0/w"]}, {"blocks/w": "extra"}),
    "more blocks": (BLOCKS, FOUR_BLOCKS, {"blocks/w": "sizes"}),
    "one block": (STACK, {**BLOCKS, "block_3/w": named("a")}, {"block_3/w": "missing"}),
    "blocks that differ": ({**BLOCKS, **LONGER_BLOCK}, STACK, {"blocks/w": "sizes"}),
}


@pytest.mark.parametrize(
    ("stored", "wanted", "options"),
    [
        (W, {"q": named("a")}, {}),
        (W, {"q": named("a")}, {"others": "keep"}),
        (W | STACK, W | STACK, {"names": {"zzz": "w"}}),
        (BARE, BARE, {"rename_axes": {"a": "b"}}),
    ],
)
def test_restore_params_gives_no_fix_that_does_not_work(tmp_path, stored, wanted, options):
    path = pzs.save_params(tmp_path / "params", stored)
    problems = problems_of(REFUSAL, pzs.restore_params, path, wanted, **options)
    assert {problem.fix for problem in problems if problem.kind != "extra"} == {""}


def test_restore_params_gives_one_fix_for_all_axes_and_for_a_tree_that_stands_elsewhere(tmp_path):
    path = pzs.save_params(tmp_path / "params", {"net/u": named("a", "b"), "net/v": named("b")})
    wanted = {"u": named("c", "d"), "v": named("d")}
    problems = problems_of(REFUSAL, pzs.restore_params, path, wanted)
    assert {problem.fix for problem in problems} == {"Write names={'net/**': '**'}."}
    problems = problems_of(REFUSAL, pzs.restore_params, path, wanted, names={"net/**": "**"})
    assert {problem.fix for problem in problems} == {"Write rename_axes={'a': 'c', 'b': 'd'}."}


def test_restore_params_names_all_differences_before_it_reads(tmp_path):
    stored, wanted = ({c: sides[i] for c, sides in DIFFERENCES.items()} for i in (0, 1))
    kinds = {f"{c}/{path}": kind for c, (*_, x) in DIFFERENCES.items() for path, kind in x.items()}
    path = pzs.save_params(tmp_path / "params", stored)
    for file in (tmp_path / "params").rglob("d/*"):
        file.unlink()
    refused(pzs.CheckpointDamagedError, pzs.restore_params, path, stored)
    assert refused_kinds(REFUSAL, pzs.restore_params, path, wanted, allow="blocks") == kinds


# Paths


def paths_filled(stored, wanted, names):
    """The stored paths of each wanted array."""
    record = ArrayRecord((2,), "float32", ("a",))
    sides = [dict.fromkeys(paths, record) for paths in (stored, wanted)]
    found = match(*sides, Options("", "extra", names=names), headline="")
    return {path: source.stored[0] for path, source in found.items()}


LAYERS = [f"model.layers.{i}.mlp.w" for i in range(3)]
UPS = [f"net/block_{i}/mlp/up.w" for i in range(3)]
LETTERS = str.maketrans("0123456789", "ghijklmnop")
RULE = {"model.layers.*.mlp.w": "net/block_*/mlp/up.w"}


@pytest.mark.parametrize(
    ("stored", "wanted", "names", "expected"),
    [
        (LAYERS, UPS, RULE, dict(zip(UPS, LAYERS, strict=True))),
        (["a", "b", "c"], ["x", "b"], {"a": "x"}, {"x": "a", "b": "b"}),
        (["a", "b"], ["a", "b"], {"a": "b", "b": "a"}, {"b": "a", "a": "b"}),
        (["enc.layer1.w"], ["blocks/enc/1/w"], {"*.layer?.w": "blocks/*/?/w"}, None),
        (["b", "a"], ["a"], {"b": "a", "a": None}, {"a": "b"}),
        (["a/0", "a/1"], ["b/0", "c"], {"a/1": "c", "a/**": "b/**"}, None),
        (["a/k/value"], ["a/k"], {"**/value": "**"}, None),
        (["a.b/c"], ["a/b.c"], {}, None),
    ],
)
def test_match_names(stored, wanted, names, expected):
    expected = dict(zip(wanted, stored, strict=True)) if expected is None else expected
    assert paths_filled(stored, wanted, names) == expected


def test_match_says_what_differs_where_thousands_do():
    """Comparing all names with all others would take minutes."""
    stored, wanted = ([f"{a}{i:04x}/w".translate(LETTERS) for i in range(4000)] for a in "uv")
    problems = refused(pzs.CheckpointMismatchError, paths_filled, stored, wanted, {})
    assert problems.keys() == {*wanted}


@pytest.mark.parametrize(
    ("stored", "wanted", "names", "path"),
    [
        (["ab"], ["x"], {"ac": "x"}, ""),
        (["a"], ["x", "y"], {"*": "x"}, ""),
        (["a", "b"], ["x"], {"a": "x", "b": "x"}, "x"),
        (["a", "x"], ["x"], {"a": "x"}, "x"),
        (["a_b_c"], ["a/b_c"], {"*_*": "*/*"}, "a_b_c"),
        (["a/b/c"], ["a/b/c"], {"**/**": "**/c/**"}, "a/b/c"),
        (["a"], ["x"], {"*": "x", "a": "x"}, ""),
    ],
)
def test_match_refuses_names(stored, wanted, names, path):
    problems = problems_of(REFUSAL, paths_filled, stored, wanted, names)
    assert next(problem.path for problem in problems if problem.kind == "names") == path
