"""Rows by path become a tree: nested, summed up, with equal blocks as one node."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penzai_shard.report_trees import TreeFigure, TreeNode, TreeRow, tree_of


def row(path, size=1, *, item="", line="", details=(), ok=None, name="held"):
    return TreeRow(path, item, line, (TreeFigure(name, size),), tuple(details), ok)


def tree(rows, **options):
    return tree_of("Test", "verdict", rows, **options)


def shape(nodes):
    """Labels, counts and sizes, nested."""
    return [
        (node.label, node.count, sum(f.value for f in node.figures), shape(node.children))
        for node in nodes
    ]


def test_rows_are_nested_by_the_parts_of_their_paths_and_sum_up():
    made = tree([row("lm/mlp.up", 3), row("lm/mlp.down", 4), row("lm/head", 5)])
    assert shape(made.children) == [
        ("lm", 1, 12, [("mlp", 1, 7, [("up", 1, 3, []), ("down", 1, 4, [])]), ("head", 1, 5, [])])
    ]
    assert [node.path for node in made.walk()] == [
        "lm",
        "lm/mlp",
        "lm/mlp.up",
        "lm/mlp.down",
        "lm/head",
    ]
    assert [figure.share for node in made.walk() for figure in node.figures] == [
        pytest.approx(size / 12) for size in (12, 7, 3, 4, 5)
    ]


def test_a_node_that_only_leads_to_another_is_written_with_it():
    made = tree([row("model/body[0].w")])
    assert [(node.label, node.path) for node in made.walk()] == [("model/body[0].w",) * 2]
    made = tree([row("a/b", line="of its own"), row("a/b/c/d")])
    assert [node.label for node in made.walk()] == ["a/b", "c/d"]
    for said in ({"line": "of its own"}, {"details": ("of its own",)}):
        made = tree([TreeRow("a/b", **said), row("a/b/c/d")])
        assert [node.label for node in made.walk()] == ["a/b", "c/d"]
    made = tree([row("a/b", item="c/d")])
    assert [node.label for node in made.walk()] == ["a/b", "c/d"]


def test_equal_blocks_are_one_node_with_ranges_count_and_sums():
    rows = [row(f"lm/stage_{s}/block_{b}/w{x}", 2) for s in (0, 1) for b in range(3) for x in "ab"]
    made = tree(rows)
    assert [(node.label, node.count, node.figures[0].value) for node in made.walk()] == [
        ("lm/stage_{0-1}/block_{0-2}", 6, 24),
        ("wa", 6, 12),
        ("wb", 6, 12),
    ]
    last = list(made.walk())[-1]
    assert last.path == "lm/stage_{0-1}/block_{0-2}/wb"
    assert last.figures[0].each(6) == "2 B"


@pytest.mark.parametrize(
    "odd",
    [
        row("lm/block_2/w", 3),
        row("lm/block_2/w", 2, line="other"),
        row("lm/block_2/w", 2, details=["other"]),
        row("lm/block_2/w", 2, ok=False),
        row("lm/block_2/w", 2, name="other"),
        row("lm/block_2/v", 2),
    ],
    ids=["size", "line", "detail", "bad", "figure", "array"],
)
def test_a_block_that_differs_stays_in_sight(odd):
    made = tree([*(row(f"lm/block_{i}/w", 2) for i in (0, 1, 3)), odd])
    (lm,) = made.children
    assert [node.path for node in lm.children] == ["lm/block_{0-1,3}/w", odd.path]


def test_its_own_path_in_a_text_does_not_make_a_block_different():
    made = tree(row(f"b{i}/w", line=f"b{i}/w is large", details=[f"see b{i}/w"]) for i in range(2))
    (node,) = made.walk()
    assert (node.line, node.details) == ("b{0-1}/w is large", ("see b{0-1}/w",))


def test_items_of_a_place_are_nodes_below_it_whatever_their_names():
    made = tree(
        [
            row("lm/mlp", 3, item="all-gather over a/b.c"),
            row("lm/mlp", 4, item="all-gather over a/b.c"),
            row("lm/mlp.w", 5),
        ]
    )
    assert shape(made.children) == [
        ("lm/mlp", 1, 12, [("all-gather over a/b.c", 1, 7, []), ("w", 1, 5, [])])
    ]


def test_what_is_bad_shows_in_all_around_it():
    made = tree([row("a/b/c", ok=False), row("a/b/d", ok=True), row("a/e", ok=True), row("f")])
    assert {node.path: node.ok for node in made.walk()} == {
        "a": False,
        "a/b": False,
        "a/b/c": False,
        "a/b/d": True,
        "a/e": True,
        "f": None,
    }


def test_shares_are_of_a_given_whole_and_there_is_none_of_nothing():
    made = tree([row("a", 5), row("b", -2), row("c", 0, name="sent")], wholes={"held": 20})
    shares = [node.figures[0].share for node in made.walk()]
    assert shares == [0.25, None, None]
    assert [(figure.value, figure.share) for figure in made.figures] == [(3, 0.15), (0, None)]
    more_than_all = tree([row("a", 5)], wholes={"held": 4})
    assert [figure.share for figure in more_than_all.figures] == [1.0]


def test_no_rows_and_rows_without_a_path():
    assert tree([]).children == () == tree([]).figures
    made = tree([row("", 4, line="f32"), row("///", 1), row("...", 1)])
    assert [(node.label, node.path) for node in made.walk()] == [
        ("the root", ""),
        ("///", "///"),
        ("...", "..."),
    ]


def test_paths_that_differ_in_their_separators_are_different_places():
    made = tree([row("a.b", 1), row("a/b", 2), row("a[b]", 4)])
    assert {node.path: node.figures[0].value for node in made.walk()} == {
        "a": 7,
        "a.b": 1,
        "a/b": 2,
        "a[b]": 4,
    }


def test_a_very_deep_model_is_nested_too():
    paths = ["/".join(f"l{i}" for i in range(n)) for n in range(1, 150)]
    made = tree([row(path) for path in paths], collapse=False)
    assert [node.path for node in made.walk()] == paths
    assert made.children[0].figures[0].value == 149


def test_control_characters_are_written_out():
    made = tree([row("a\x1b[31m\nb", line="\r", details=["x\u2028y"])])
    (node,) = (node for node in made.walk() if not node.children)
    texts = (node.label, node.path, node.line, *node.details)
    assert all(text.isprintable() for text in texts)
    assert node.path.startswith("a\\x1b[31m")
    assert TreeNode("\0", "").label == "\\x00"


PARTS = st.sampled_from(["a", "b_0", "b_1", "b_10", "c.w", "x{0}", "d[1]", "", "e"])
PATHS = st.lists(PARTS, max_size=5).map("/".join)


@given(st.lists(st.tuples(PATHS, st.integers(0, 2**60)), max_size=30), st.booleans())
def test_sums_are_exact_at_every_depth(places, collapse):
    made = tree([row(path, size) for path, size in places], collapse=collapse)
    total = sum(size for _, size in places)
    assert sum(node.figures[0].value for node in made.children) == total
    assert [figure.value for figure in made.figures] == [total] * bool(places)
    own = collections.Counter()
    for path, size in places:
        own[path] += size
    for node in made.walk():
        inside = sum(child.figures[0].value for child in node.children)
        assert node.figures[0].value >= inside
        if not collapse and node.path in own:
            assert node.figures[0].value == inside + own[node.path]


@given(st.lists(PATHS, min_size=1, max_size=30, unique=True))
def test_every_path_is_in_the_tree_and_folded_it_counts_for_one(paths):
    open_tree = tree([row(path, 1) for path in paths], collapse=False)
    assert set(paths) <= {node.path for node in open_tree.walk()}
    folded = tree([row(path, 1) for path in paths])
    leaves = sum(node.count for node in open_tree.walk() if not node.children)
    assert sum(node.count for node in folded.walk() if not node.children) == leaves


def test_equal_blocks_are_one_node_in_whatever_order_their_parts_come():
    rows = [
        row(f"lm/block_{i}/{x}", size)
        for i, xs in enumerate(["abc", "cab"])
        for x, size in zip(xs, ((1, 2, 3), (3, 1, 2))[i], strict=True)
    ]
    assert shape(tree(rows).children) == [
        ("lm/block_{0-1}", 2, 12, [("a", 2, 2, []), ("b", 2, 4, []), ("c", 2, 6, [])])
    ]


def test_a_given_order_comes_first_and_adds_no_nodes():
    made = tree([row("lm/x"), row("lm/b/w"), row("lm/a/w")], order=["lm/a", "lm/none", "lm/b"])
    assert [node.path for node in made.walk()] == ["lm", "lm/a/w", "lm/b/w", "lm/x"]


def test_figures_are_in_one_order_in_all_nodes():
    made = tree([row("a/x", name="held"), row("b/y", name="sent"), row("b/y", name="held")])
    assert [[f.name for f in node.figures] for node in made.children] == [
        ["held"],
        ["held", "sent"],
    ]


def test_a_group_is_a_node_of_its_own_around_paths():
    rows = [
        TreeRow("a/b.c", group="1. first (of 2)", figures=(TreeFigure("held", 1),)),
        TreeRow("", group="2. nothing", details=("said",)),
        TreeRow("a/b.c", group="3. last", figures=(TreeFigure("held", 2),)),
    ]
    assert shape(tree(rows).children) == [
        ("1. first (of 2)", 1, 1, [("a/b.c", 1, 1, [])]),
        ("2. nothing", 1, 0, []),
        ("3. last", 1, 2, [("a/b.c", 1, 2, [])]),
    ]
