"""Which stored array fills which wanted one: every difference is named, with a fix that works."""

import ast
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.matching import match, read_options
from penzai_shard.checkpoints.records import ArrayRecord


def named(*axes, sizes=(4, 6, 2), dtype="float32", first=0):
    shape = sizes[: len(axes)]
    data = np.arange(np.prod(shape), dtype=dtype).reshape(shape) + np.asarray(first, dtype)
    return pz.nx.wrap(jnp.asarray(data), *axes)


def numbers(value):
    data = getattr(value, "data_array", value)
    is_key = jnp.issubdtype(data.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(data) if is_key else data)


def kinds_by_path(error):
    kinds = {}
    for problem in error.problems:
        kinds[problem.path] = " ".join(filter(None, [kinds.get(problem.path), problem.kind]))
    return kinds


def read_fix(fix):
    """The option that a fix says to write."""
    option, value = re.fullmatch(r"Write (\w+)=(.*)\.", fix).groups()
    return {option: ast.literal_eval(value)}


W, V = {"w": named("a", "b")}, {"w": named("a", "c")}
TURNED = {"w": named("b", "a", sizes=(6, 4), dtype="int32")}
NEAR = [{f"{end}": W["w"]} for end in ("up.weight", "up.weights")]
NUMBERED = [{f"net/{name}_{i}/mlp/w": W["w"] for i in (0, 1)} for name in ("layer", "block")]
BLOCKS = {f"block_{i}/w": named("a", first=10 * i) for i in range(3)}
STACK = {"blocks/w": pz.nx.wrap(jnp.stack([numbers(b) for b in BLOCKS.values()]), "blocks", "a")}
LORA = {"w/lora": named("a")}
# What is stored, what is wanted, the kinds of the problems by path, and the last array then.
FIXED_BY_AN_OPTION = {
    "order and dtype": (W, TURNED, {"w": "dtype order"}, numbers(W["w"]).T),
    "axes": (W, V, {"w": "axes"}, numbers(W["w"])),
    "path": (*NEAR, {"up.weights": "missing", "up.weight": "extra"}, numbers(W["w"])),
    "paths of blocks": (
        *NUMBERED,
        dict.fromkeys(NUMBERED[1], "missing") | dict.fromkeys(NUMBERED[0], "extra"),
        numbers(W["w"]),
    ),
    "extra": (W | LORA, W, {"w/lora": "extra"}, numbers(W["w"])),
    "kept": (W, W | LORA, {"w/lora": "missing"}, numbers(LORA["w/lora"])),
    "stacked": (BLOCKS, STACK, {"blocks/w": "blocks"}, numbers(STACK["blocks/w"])),
    "apart": (STACK, BLOCKS, dict.fromkeys(BLOCKS, "blocks"), numbers(BLOCKS["block_2/w"])),
}


@pytest.mark.parametrize("case", FIXED_BY_AN_OPTION)
def test_restore_params_difference_and_fix(tmp_path, case):
    stored, wanted, kinds, expected = FIXED_BY_AN_OPTION[case]
    path = pzs.save_params(tmp_path / "params", stored)
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_params(path, wanted)
    assert kinds_by_path(caught.value) == kinds
    # What is in the way of a renaming is then no longer extra.
    problems = sorted(caught.value.problems, key=lambda problem: problem.kind == "extra")
    fix = "Write others='keep'." if case == "kept" else problems[0].fix
    restored = pzs.restore_params(path, wanted, **read_fix(fix))
    np.testing.assert_array_equal(numbers(restored[max(wanted)]), expected)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)


KEY, RBG = {"k": jax.random.key(0)}, {"k": jax.random.key(0, impl="rbg")}
FOUR_BLOCKS = {"blocks/w": pz.nx.zeros({"blocks": 4, "a": 4})}
LONGER_BLOCK = {"block_2/w": named("a", sizes=(5,))}
OTHERS = {
    "sizes": (W, {"w": named("a", "b", sizes=(4, 3))}, {"w": "sizes"}),
    "names on one side": (W, {"w": numbers(W["w"])}, {"w": "axes"}),
    "key": (KEY, RBG, {"k": "key"}),
    "key and numbers": (KEY, {"k": jnp.zeros(2, "uint32")}, {"k": "key axes"}),
    "fewer blocks wanted": (STACK, {"block_0/w": named("a")}, {"blocks/w": "extra"}),
    "more blocks wanted": (BLOCKS, FOUR_BLOCKS, {"blocks/w": "sizes"}),
    "one block more": (STACK, {**BLOCKS, "block_3/w": named("a")}, {"block_3/w": "missing"}),
    "blocks that differ": ({**BLOCKS, **LONGER_BLOCK}, STACK, {"blocks/w": "sizes"}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_restore_params_difference_without_option(tmp_path, case):
    stored, wanted, kinds = OTHERS[case]
    path = pzs.save_params(tmp_path / "params", stored)
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_params(path, wanted, allow=("transpose", "cast", "blocks"))
    assert kinds_by_path(caught.value) == kinds
    assert all(problem.fix for problem in caught.value.problems)


def test_restore_params_names_all_differences_before_it_reads(tmp_path):
    stored = {case: values[0] for case, values in (FIXED_BY_AN_OPTION | OTHERS).items()}
    wanted = {case: values[1] for case, values in (FIXED_BY_AN_OPTION | OTHERS).items()}
    path = pzs.save_params(tmp_path / "params", stored)
    for file in (tmp_path / "params").rglob("d/*"):
        file.unlink()
    with pytest.raises(pzs.CheckpointDamagedError):
        pzs.restore_params(path, stored)
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_params(path, wanted)
    found = {problem.path.partition("/")[0] for problem in caught.value.problems}
    assert found == wanted.keys()


# Paths


def record(**axes):
    return ArrayRecord(tuple(axes.values()), "float32", tuple(axes))


def paths_filled(stored, wanted, names, **options):
    """The stored path of each wanted array."""
    sides = [dict.fromkeys(paths, record(a=2)) for paths in (stored, wanted)]
    found = match(*sides, read_options("", names=names, allow="extra"), headline="", **options)
    return {path: source.stored[0] for path, source in found.items()}


LAYERS = [f"model.layers.{i}.mlp.w" for i in range(3)]
UPS = [f"net/block_{i}/mlp/up.w" for i in range(3)]
RULE = {"model.layers.*.mlp.w": "net/block_*/mlp/up.w"}


@pytest.mark.parametrize(
    ("stored", "wanted", "names", "expected"),
    [
        (LAYERS, UPS, RULE, dict(zip(UPS, LAYERS, strict=True))),
        (["a", "b", "c"], ["x", "b"], {"a": "x"}, {"x": "a", "b": "b"}),
        (["a", "b"], ["a", "b"], {"a": "b", "b": "a"}, {"b": "a", "a": "b"}),
        (["enc.layer1.w"], ["blocks/enc/1/w"], {"*.layer?.w": "blocks/*/?/w"}, None),
        (["w*", "w1"], ["x", "w1"], {"w*": "x"}, {"x": "w*", "w1": "w1"}),
        (["b", "a"], ["a"], {"b": "a", "a": None}, {"a": "b"}),
        (["a/0", "a/1"], ["b/0", "c"], {"a/1": "c", "a/**": "b/**"}, None),
        (["a/k/value"], ["a/k"], {"**/value": "**"}, None),
        (["a.b/c"], ["a/b.c"], {}, None),
    ],
)
def test_match_names(stored, wanted, names, expected):
    expected = dict(zip(wanted, stored, strict=True)) if expected is None else expected
    assert paths_filled(stored, wanted, names) == expected


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
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        paths_filled(stored, wanted, names)
    (found,) = [p for p in caught.value.problems if p.kind == "names"][:1]
    assert found.path == path
    assert found.fix


PIECES = st.text("ab1", min_size=1, max_size=3)


@hypothesis.given(st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=6, unique=True))
def test_match_renamed_paths_are_all_found(pairs):
    rules = {"enc.*.*.w": "net/*/layer_*/w", "head": "lm_head"}
    expected = {f"net/{a}/layer_{b}/w": f"enc.{a}.{b}.w" for a, b in pairs}
    expected["lm_head"] = "head"
    assert paths_filled(expected.values(), expected.keys(), rules) == expected


def test_match_rules_of_a_state_are_of_parameters_and_statistics_follow():
    stored = ["step", "params/a/w", "opt_state/0/mu/a/w", "params/rate", "opt_state/0/mu/rate"]
    wanted = [path.replace("a/w", "b/w").replace("rate", "r") for path in stored]
    # A number of the optimizer, though it is called like a parameter.
    hyperparameters = ["opt_state/hyper/rate", "opt_state/hyper/decay"]
    stored, wanted = stored + hyperparameters, wanted + hyperparameters
    found = paths_filled(stored, wanted, {"a/**": "b/**", "rate": "r"}, is_state=True)
    assert found == dict(zip(wanted, stored, strict=True))
    with pytest.raises(pzs.CheckpointMismatchError):
        paths_filled(stored, wanted, {"params/a/**": "params/b/**", "rate": "r"}, is_state=True)


# Blocks


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_restore_params_stacks_and_unstacks(tmp_path, dim):
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    whole = np.arange(8 * 4 * 6).reshape(8, 4, 6)
    apart = {f"net/block_{i}/w": pz.nx.wrap(whole[i], "a", "b") for i in range(8)}
    axes = ["a", "b"]
    axes.insert(dim, "blocks")
    stack = {"net/blocks/w": pz.nx.wrap(np.moveaxis(whole, 0, dim), *axes)}
    paths = [pzs.save_params(tmp_path / name, v) for name, v in (("1", apart), ("2", stack))]
    for path, wanted in zip(paths, (stack, apart), strict=True):
        rules = {"blocks": ("data", "model")} if wanted is stack else {"a": "data"}
        restored = pzs.restore_params(path, wanted, mesh, rules, allow=("blocks",))
        jax.tree.map(np.testing.assert_array_equal, restored, wanted)
        assert (
            jax.tree.leaves(restored)[0].sharding
            == jax.tree.leaves(pzs.name_to_name_sharding(wanted, mesh, rules))[0]
        )


def test_restore_params_blocks_renamed_transposed_and_cast(tmp_path):
    stored = {f"layers.{i}.w": named("a", "b", first=100 * i) for i in range(3)}
    path = pzs.save_params(tmp_path / "params", stored)
    wanted = {"blocks/w": pz.nx.zeros({"blocks": 3, "b": 6, "a": 4}, "int32")}
    allow = ("blocks", "transpose", "cast")
    restored = pzs.restore_params(path, wanted, names={"layers.*.w": "block_*/w"}, allow=allow)
    expected = np.stack([numbers(value).T for value in stored.values()])
    np.testing.assert_array_equal(numbers(restored["blocks/w"]), expected)
