"""Key paths as text, and the patterns that match it."""

import dataclasses
import fnmatch

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from penzai_shard.tree_paths import join_paths, path_matches, path_text, split_path


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: object
    right: object


def paths_of(tree):
    return [path_text(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def test_paths_of_all_containers_read_alike():
    assert paths_of({"a": [1.0, (2.0,)]}) == ["a/0", "a/1/0"]
    assert paths_of(Pair(4.0, {"b.c": 5.0})) == ["left", "right/b.c"]
    assert paths_of({3: 1.0}) == ["3"]


def test_the_path_of_the_root_is_empty():
    assert paths_of(1.0) == [""]
    assert join_paths("", "") == ""
    assert join_paths("model", "", "w") == "model/w"


@pytest.mark.parametrize(
    "path", ["layers/0/weight", "layers.0.weight", "layers[0].weight", "/layers/0//weight/"]
)
def test_dots_slashes_and_brackets_all_separate_parts(path):
    assert split_path(path) == ("layers", "0", "weight")


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layers.*.weight", "layers/0/weight", True),
        ("layers.*.weight", "layers.0.weight", True),
        ("layers/*/weight", "layers/0/mlp/weight", False),
        ("layers.*.weight", "layers/weight", False),
        ("**", "", True),
        ("**", "any/path", True),
        ("**/weight", "weight", True),
        ("**/weight", "a/b/weight", True),
        ("**/weight", "a/b/weights", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/x/y/b/c", False),
        ("**/a/**/a", "a", False),
        ("**/a/**/a", "a/a", True),
        ("block_?", "block_3", True),
        ("block_?", "block_10", False),
        ("block_[0-3]", "block_2", False),
        ("Weight", "weight", False),
        ("", "", True),
        ("", "a", False),
        ("*", "", False),
    ],
)
def test_patterns_match_whole_paths(pattern, path, matches):
    assert path_matches(pattern, path) is matches


def _matches_slowly(pattern, parts):
    """The definition, by trying everything."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches_slowly(pattern[1:], parts[i:]) for i in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatch.fnmatchcase(parts[0], pattern[0])
        and _matches_slowly(pattern[1:], parts[1:])
    )


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.lists(st.sampled_from(["a", "b", "*", "**", "?"]), max_size=6),
    st.lists(st.sampled_from(["a", "b", "ab"]), max_size=6),
)
def test_matching_agrees_with_its_definition(pattern, parts):
    assert path_matches("/".join(pattern), "/".join(parts)) == _matches_slowly(pattern, parts)


def test_many_double_stars_do_not_blow_up():
    pattern = "/".join(["**", "a"] * 30)
    assert not path_matches(pattern, "/".join(["a"] * 29 + ["b"]))
