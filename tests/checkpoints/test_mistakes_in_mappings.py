"""Fifty drawn mistakes in what is to fill what: each is refused by name, and its fix works."""

import ast
import random
import re

import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.moving import move
from tests.checkpoints.trees import contents, numbers

SIZES = {"embed": 4, "mlp": 6, "vocab": 5, "blocks": 3}
AXES = {
    **{f"net/block_{i}/up.w": ("embed", "mlp") for i in range(3)},
    **{f"net/block_{i}/down.w": ("mlp", "embed") for i in range(3)},
    "head.w": ("embed", "vocab"),
    "scale": ("embed",),
}


def build(axes, first=0, **changed):
    """Arrays by path, each with other numbers; ``changed`` are other sizes and a dtype."""
    sizes, tree = SIZES | changed, {}
    for i, (path, names) in enumerate(axes.items()):
        shape = [sizes[name] for name in names]
        data = first + 100 * i + jnp.arange(np.prod(shape), dtype="float32").reshape(shape)
        tree[path] = pz.nx.wrap(data, *names)
    return tree


TREE = build(AXES)
ZEROS = {path: value * 0 for path, value in TREE.items()}


def with_axes(path, names, **sizes):
    return ZEROS | {path: build({path: names}, **sizes)[path] * 0}


# Each draws the wanted tree, options, and the path of a problem.


def misspelt(draw, text):
    place = draw.randrange(1, len(text.split("/")[0]))
    return text[:place] + text[place + 1 :]


def wrong_rule(draw):
    """A pattern, a path, or what it becomes is misspelt."""
    start, stem = draw.choice(["net/block_*/", "*/block_*/"]), draw.choice(["up", "down"])
    right, wrong = f"{start}{stem}.w", f"{start}{misspelt(draw, stem)}.w"
    path = draw.choice(["head.w", "scale", "net/block_1/up.w"])
    rules = {wrong: right}, {misspelt(draw, path): path}, {right: wrong}
    paths = "", "", f"net/block_{draw.randrange(3)}/{stem}.w"
    names, named = draw.choice([*zip(rules, paths, strict=True)])
    return ZEROS, {"names": names}, named


def other_paths(draw):
    """The wanted tree calls its blocks otherwise."""
    word = draw.choice(["layer", "blok", "layers"])
    wanted = {path.replace("block", word): value for path, value in ZEROS.items()}
    return wanted, {}, f"net/{word}_1/up.w"


def unlike_path(draw):
    """Only the sizes tell which array it is."""
    path, other = draw.choice([("head.w", "classifier/kernel"), ("scale", "norm/gain")])
    return {other if key == path else key: value for key, value in ZEROS.items()}, {}, other


def one_path_twice(draw):
    path, other = draw.sample([f"net/block_{i}/up.w" for i in range(3)], 2)
    wanted = {key: value for key, value in ZEROS.items() if key != path}
    return wanted, {"names": {path: other}}, other


def wrong_axis(draw):
    axis = draw.choice(["embed", "mlp", "vocab"])
    return ZEROS, {"rename_axes": {misspelt(draw, axis): axis}}, ""


def renamed_axis(draw):
    old, new = draw.choice(["embed", "mlp", "vocab"]), draw.choice(["features", "wide"])
    axes = {path: tuple(new if a == old else a for a in names) for path, names in AXES.items()}
    wanted = {path: value * 0 for path, value in build(axes, **{new: SIZES[old]}).items()}
    return wanted, {}, draw.choice([path for path, names in AXES.items() if old in names])


def renamed_in_one_array(draw):
    path = draw.choice([path for path in AXES if path != "scale"])
    return with_axes(path, ("features", AXES[path][1]), features=SIZES[AXES[path][0]]), {}, path


def other_form(draw):
    """Another order of axes, dtype, or sizes."""
    path = draw.choice([path for path in AXES if path != "scale"])
    forms = [with_axes(path, AXES[path][::-1]), with_axes(path, AXES[path], embed=3, mlp=3)]
    forms += [ZEROS | {path: pz.nx.zeros(ZEROS[path].named_shape, dtype="int32")}]
    return draw.choice(forms), {}, path


def fewer_arrays(draw):
    path = draw.choice([*AXES])
    return {key: value for key, value in ZEROS.items() if key != path}, {}, path


def more_arrays(draw):
    path = draw.choice(["lora/a", "extra.b"])
    return ZEROS | {path: pz.nx.zeros({"embed": 4})}, {}, path


def stacked(draw):
    wanted = {path: value for path, value in ZEROS.items() if "block" not in path}
    ends = {"up.w": ("blocks", "embed", "mlp"), "down.w": ("mlp", "blocks", "embed")}
    ends = {f"net/blocks/{end}": names for end, names in ends.items()}
    return wanted | {path: x * 0 for path, x in build(ends).items()}, {}, draw.choice([*ends])


def wrong_choice(draw):
    wrong = f"net/block_*/{misspelt(draw, draw.choice(['up', 'down']))}.w"
    return ZEROS, {"only": wrong, "others": "keep"}, wrong


MISTAKES = [wrong_rule, wrong_rule, other_paths, unlike_path, one_path_twice]
MISTAKES += [wrong_axis, renamed_axis, renamed_in_one_array, other_form, other_form, fewer_arrays]
MISTAKES += [more_arrays, stacked, wrong_choice]


def apply_fix(problem, wanted, options):
    """The tree and the options with what the fix says, as a reader would do it."""
    option = re.match(r"Write (\w+)=(.*)\.$", problem.fix)
    word = re.match(r"Write '(.*)'\.$", problem.fix)
    if option:
        return wanted, options | {option[1]: ast.literal_eval(option[2])}
    if word:
        # The word is for the one that stands in the only option besides ``others``.
        ((key, value),) = [item for item in options.items() if item[0] != "others"]
        right = dict.fromkeys([word[1]], *value.values()) if isinstance(value, dict) else word[1]
        return wanted, options | {key: right}
    if "others='keep'" in problem.fix:
        return wanted, options | {"others": "keep"}
    assert problem.fix.startswith(("Give an array with axes", "Build the model with"))
    return wanted | {problem.path: ZEROS[problem.path]}, options


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """The functions that fill a tree, by name."""
    folder = tmp_path_factory.mktemp("stored")
    path = pzs.save_params(folder / "params", TREE)
    tensors = pzs.save_safetensors(folder / "tensors", TREE)
    return {
        "move": lambda wanted, **options: move(TREE, wanted, **options),
        "restore": lambda wanted, **options: pzs.restore_params(path, wanted, **options),
        "safetensors": lambda wanted, **options: pzs.restore_params(tensors, wanted, **options),
    }


@pytest.mark.parametrize("seed", range(50))
def test_each_mistake_is_refused_by_name_and_its_fix_works(ways, seed):
    draw = random.Random(seed)
    mistake = MISTAKES[seed % len(MISTAKES)]
    drawn, drawn_options, path = mistake(draw)
    results = []
    for fill in ways.values():
        wanted, options, seen = drawn, drawn_options, set()
        for attempt in range(4):
            try:
                filled = fill(wanted, **options)
                break
            except pzs.ShardingError as error:
                problems = error.problems
                assert attempt or path in {problem.path for problem in problems}
                # What is in the way of a renaming is then no longer extra.
                problems = sorted(problems, key=lambda x: (not x.fix, x.kind == "extra"))
                seen.add(problems[0].fix)
                wanted, options = apply_fix(problems[0], wanted, options)
        else:
            pytest.fail(f"no fix works: {seen}")
        assert seen, "it was not refused"
        results.append(contents(filled))
    assert results[0] == results[1] == results[2]
    taken = drawn_options["names"] if mistake is one_path_twice else {}
    names = {new: old for old, new in taken.items()}
    for path in () if mistake in (wrong_choice, renamed_axis) else AXES.keys() & filled.keys():
        found = filled[path].untag(*AXES[path]).unwrap()
        np.testing.assert_array_equal(found, numbers(TREE[names.get(path, path)]))
