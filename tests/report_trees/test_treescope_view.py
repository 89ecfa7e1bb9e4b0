"""A report's tree in treescope: it folds, says its figures, and shows hostile names as they are."""

import html.parser

import pytest
import treescope

from penzai_shard.report_trees import TreeFigure, TreeRow, tree_of

HOSTILE = "<script>alert('x')</script>&amp;\"'\x1b[31m\n"


def row(path, size, **options):
    return TreeRow(path, figures=(TreeFigure("held", size),), **options)


def blocks(count, **options):
    rows = [
        row(f"lm/block_{i}/{name}", 2**20, line="embedding=4/data", details=("by a rule",))
        for i in range(count)
        for name in ("up.weights", "down.weights")
    ]
    return tree_of("Plan", "all of it", [*rows, row("lm/head", 2**20)], notes=["noted"], **options)


class Read(html.parser.HTMLParser):
    """Titles, classes and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.titles, self.classes, self.text = set(), [], set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        found = dict(attributes)
        self.titles += [found["title"]] if "title" in found else []
        self.classes.update((found.get("class") or "").split())

    def handle_data(self, data):
        self.text += data


def page(value):
    return Read(treescope.render_to_html(value, compressed=False))


def test_text_has_a_line_for_each_node_with_its_figures():
    assert treescope.render_to_text(blocks(3)).splitlines() == [
        "<Plan: all of it",
        "  lm  held 7.0 MiB (100%)",
        "    block_{0-2} x 3  held 6.0 MiB (86%), each 2.0 MiB",
        "      up.weights  held 3.0 MiB (43%)  embedding=4/data",
        "      down.weights  held 3.0 MiB (43%)  embedding=4/data",
        "    head  held 1.0 MiB (14%)",
        "  # noted",
        ">",
    ]


def test_it_prints_as_the_same_lines_all_of_them_open():
    tree = blocks(3)
    assert str(tree).splitlines() == [
        "all of it",
        "lm  held 7.0 MiB (100%)",
        "  block_{0-2} x 3  held 6.0 MiB (86%), each 2.0 MiB",
        "    up.weights  held 3.0 MiB (43%)  embedding=4/data",
        "    down.weights  held 3.0 MiB (43%)  embedding=4/data",
        "  head  held 1.0 MiB (14%)",
        "noted",
    ]
    assert repr(tree) == str(tree)
    assert len(str(blocks(60, collapse=False)).splitlines()) == 184


def test_hovering_gives_the_path_and_the_figures_in_words():
    titles = page(blocks(3)).titles
    assert "lm/block_{0-2}\nheld: 6.0 MiB, 86% of the whole; each of 3: 2.0 MiB" in titles
    assert (
        "lm/block_{0-2}/up.weights\nheld: 3.0 MiB, 43% of the whole; each of 3: 1.0 MiB" in titles
    )
    assert "lm/head\nheld: 1.0 MiB, 14% of the whole" in titles


def test_the_longer_the_share_the_longer_the_bar():
    classes = page(blocks(3)).classes
    assert {"pzs-bar-20", "pzs-bar-17", "pzs-bar-9", "pzs-bar-3"} <= classes


def test_details_are_there_to_be_opened():
    assert "# by a rule" in page(blocks(1)).text
    assert "by a rule" not in treescope.render_to_text(blocks(1))


def test_what_is_bad_is_open_at_first_with_its_sentences():
    rows = [row("big/" + "x", 2**20, details=("fine",)), row("small/y", 1, details=("broken",))]
    assert "broken" not in treescope.render_to_text(tree_of("T", "", rows))
    rows[1] = row("small/y", 1, details=("broken",), ok=False)
    text = treescope.render_to_text(tree_of("T", "", rows))
    assert "# broken" in text
    assert "fine" not in text


def test_what_is_good_or_bad_is_marked():
    good, bad = row("a", 1, ok=True), row("b", 1, ok=False)
    assert {"pzs-good", "pzs-bad"} <= page(tree_of("T", "", [good, bad])).classes
    assert "pzs-bad" not in page(tree_of("T", "", [good])).classes
    assert "pzs-good" in page(tree_of("T", "fits", [], ok=True)).classes


def test_a_large_tree_starts_with_little_open_and_all_of_it_there():
    big = blocks(60, collapse=False)
    assert len(treescope.render_to_text(big).splitlines()) < 10
    text = page(big).text
    assert all(f"block_{i}" in text for i in range(60))


@pytest.mark.parametrize("place", ["path", "line", "details", "verdict", "notes", "figure"])
def test_hostile_names_are_shown_and_not_obeyed(place):
    texts = dict.fromkeys(["path", "line", "details", "verdict", "notes", "figure"], "fine")
    texts[place] = HOSTILE
    made = tree_of(
        "T",
        texts["verdict"],
        [
            TreeRow(
                texts["path"],
                line=texts["line"],
                details=(texts["details"],),
                figures=(TreeFigure(texts["figure"], 1),),
            )
        ],
        notes=[texts["notes"]],
    )
    harmless = tree_of(
        "T",
        "fine",
        [
            TreeRow(
                "a/b" if place == "path" else "fine",
                line="fine",
                details=("fine",),
                figures=(TreeFigure("fine", 1),),
            )
        ],
        notes=["fine"],
    )
    shown = page(made)
    assert shown.tags == page(harmless).tags
    assert "alert('x')" in shown.text
    assert "\x1b" not in treescope.render_to_text(made)


def test_in_roundtrip_mode_and_inside_other_values_it_is_readable():
    text = treescope.render_to_text({"plan": blocks(1), "x": 3}, roundtrip_mode=True)
    assert "lm  held 3.0 MiB (100%)" in text
    assert "'x': 3" in text
    assert "fold" not in text


def test_an_empty_tree_is_its_verdict():
    assert treescope.render_to_text(tree_of("Plan", "nothing", [])) == "<Plan: nothing>"
