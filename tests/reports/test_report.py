"""One report, many views: the same numbers in all of them, at any width, whatever the text."""

import dataclasses
import html.parser
import json
import re

import numpy as np
import pytest
import treescope
from hypothesis import given
from hypothesis import strategies as st

from penzai_shard.errors import SelectionError
from penzai_shard.reports.report import Column, Report

PATH = Column("path", "path")
BYTES = Column("bytes", "bytes")
WIDTHS = (40, 60, 80, 100, 120)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e\n"


def plan_report(blocks=12, **fields):
    columns = (PATH, Column("names"), Column("dtype"), BYTES, Column("parameters", "count"))
    rows = [("embedder/table", ("vocabulary", "embedding"), "float32", 2**20, 2**18)]
    for block in range(blocks):
        for name, size in (("query", 2**12), ("key", 2**11), ("norm", 2**6)):
            path, axes = f"decoder/block_{block}/{name}/weights", ("embedding", name)
            rows.append((path, axes, "float32", 4 * size, size))
    notes = ["One rule fits nothing."]
    return Report("Plan", f"{len(rows)} arrays", columns, rows, notes, **fields)


def treescope_page(value):
    return treescope.render_to_html(value, compressed=False)


class Page(html.parser.HTMLParser):
    """The tags, the attributes and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.open_tags = set(), set(), "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in ("wbr", "br"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_views_show_the_same_numbers():
    report = plan_report()
    # By hand: 12 folded blocks.
    sizes = {"embedder/table": "1.0 MiB", "query": "192.0 KiB", "norm": "3.0 KiB"}
    pages = [Page(view._repr_html_()).text for view in (report, report.tree())]
    for view in (str(report), str(report.tree()), *pages, treescope_page(report)):
        for path, size in sizes.items():
            assert re.search(rf"{path}.*?{size}", view, re.DOTALL)
    rows = json.loads(report.to_json())["rows"]
    assert sum(row["bytes"] for row in rows if "query" in row["path"]) == 192 * 2**10


def test_narrow_table_is_written_in_lines_and_breaks_no_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert "    bytes: 192.0 KiB" in str(plan_report()).splitlines()
    word = "p" * 70
    assert word in str(Report("Words", word, (PATH, BYTES), [(word, 1)]))


@pytest.mark.parametrize("width", [60, 80])
def test_table_breaks_a_heading_that_is_wider_than_its_column(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    columns = (PATH, Column("logical axes/mesh axes of an array"), BYTES, Column("reason"))
    rows = [("decoder/block_0/mlp/weights", "embed=4096/data", 64, "'embed' -> 'data'")]
    lines = str(Report("plan", "1 array", columns, rows)).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line.startswith("    ") for line in lines[:2])


PIECES = st.text("abcdefgh_", min_size=1, max_size=14)
ROWS = st.tuples(
    st.lists(PIECES, min_size=1, max_size=9).map("/".join),
    st.lists(PIECES, min_size=1, max_size=5).map(" ".join),
    st.one_of(st.none(), st.lists(PIECES, min_size=1, max_size=9).map(" ".join)),
    st.integers(0, 2**40),
)


@given(st.lists(ROWS, min_size=1, max_size=6), st.sampled_from(WIDTHS), st.booleans())
def test_lines_fit_the_width_and_break_no_word(rows, width, as_tree):
    columns = (PATH, Column("says"), Column("why", "detail"), BYTES)
    report = Report("Words", "words " * 30, columns, rows, ["A note of words. " * 12])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        text = str(report.tree() if as_tree else report)
    assert max(map(len, text.splitlines())) <= width
    # Sentences end with a full stop.
    seen = {piece.rstrip(".") for piece in re.split(r"[\s/]", text)}
    for path, says, why, _ in rows:
        assert {*path.split("/"), *says.split(), *(why or "").split()} <= seen


def test_equal_blocks_fold_unless_one_differs():
    report = plan_report()
    whole = report.table(collapse=False)
    for view in (str(whole), str(report.tree(collapse=False)), treescope_page(whole)):
        assert "block_3/" in view
        assert "block_{0-11}" not in view
    rows = [
        (path, "other" if "block_3/norm" in path else names, *values)
        for path, names, *values in report.rows
    ]
    folded = str(Report("Plan", "", report.columns, rows))
    for path in ("block_{0-2,4-11}/norm", "block_3/norm", "block_{0-11}/key"):
        assert path in folded
    # A column that says one thing becomes a note.
    assert "In all rows: dtype float32." in folded
    assert folded.splitlines()[1].split() == ["path", "x", "names", "bytes", "parameters"]


def test_columns_by_kind():
    columns = [PATH, Column("time", "seconds"), Column("part", "percent"), Column("same", "ok")]
    columns += [Column("why", "detail"), Column("hidden", "bytes", shown=False)]
    rows = [("a", 0.0123, 0.25, True, None, 1024), ("b", 3.0, 0.75, np.bool_(False), "A why.", 0)]
    report = Report("Kinds", "", columns, rows)
    assert [line.split() for line in str(report).splitlines()[2:]] == [
        ["a", "12.3", "ms", "25%", "yes"],
        ["b", "3", "s", "75%", "no"],
        ["A", "why."],
    ]
    assert report._repr_html_().count('<tr class="bad">') == 1
    # A figure that stands as text, as in a comparison, stays on one line.
    figure = Report("Kinds", "", [Column("now")], [("48.0 MiB",)])
    assert '<td class="figure">48.0 MiB<' in figure._repr_html_()
    assert "hidden 1.0 KiB" in str(report.tree())
    # JSON knows no booleans of NumPy.
    assert json.loads(report.to_json())["rows"][1]["same"] is False


def test_hostile_text_is_harmless():
    columns = (PATH, Column("says"), Column("why", "detail"), BYTES)
    rows = [(f"{HOSTILE}/{n}", f"{n}{HOSTILE}", HOSTILE, 1) for n in ("a", "b")]
    report = Report(HOSTILE, HOSTILE, columns, rows, [HOSTILE])
    for text in (str(report), str(report.tree()), treescope_page(report), report._repr_html_()):
        assert not set("\x1b\u202e") & set(text)
    for view in (report, report.tree()):
        page = Page(view._repr_html_())
        allowed = "style section div strong table tr th td wbr br details summary span"
        assert page.tags <= set(allowed.split())
        assert page.attributes <= {"class", "style", "colspan", "open"}
        assert page.open_tags == []
        assert "onerror=alert(2)" in page.text
    assert "<img" not in treescope_page(report)


def test_treescope_page_is_small_and_folds_blocks():
    page = treescope_page({"plan": plan_report(53)})
    assert len(page) < 40_000
    assert "block_{0-52}/" in page
    # What the copy button gives.
    assert "data-copy=\"['plan']\"" in page


def test_tree_nests_sums_and_shows_each_row_of_one_path():
    rows = [("a", 30), ("a/b/c", 10), ("a/b/d", 20), ("optimizer:mu", 40), ("", 100)]
    assert str(Report("Tree", "All", (PATH, BYTES), rows).tree()).splitlines() == [
        "All",
        "a/  bytes 60 B (30%)",
        "  b/  bytes 30 B (15%)",
        "    c  bytes 10 B (5%)",
        "    d  bytes 20 B (10%)",
        "optimizer:mu  bytes 40 B (20%)",
        "(root)  bytes 100 B (50%)",
    ]
    one = Report("Tree", "", (PATH, Column("kind"), BYTES), [("a/b/c", "x", 10), ("a/b/c", "y", 5)])
    assert str(one.tree()).splitlines()[1:] == [
        "a/b/c  bytes 15 B (100%)",
        "  x  bytes 10 B (67%)",
        "  y  bytes 5 B (33%)",
    ]
    dots = Report("", "", (PATH, BYTES), [("a/s.w", 1000), ("a/s.b", 0), ("", -1)])
    assert str(dots.tree()).splitlines()[1] == "a/s  bytes 1,000 B (100%)".replace(",", "")
    assert str(dots.tree()).splitlines()[-1] == "(root)  bytes -1 B (0%)"


def test_largest_sums_up_the_rest():
    report = plan_report()
    rows = report.largest("bytes", 2).to_data()["rows"]
    paths = ["embedder/table", "decoder/block_{0-11}/query/weights", "(2 more)"]
    assert [row["path"] for row in rows] == paths
    assert (rows[2]["x"], rows[2]["names"]) == (24, None)
    assert sum(row["bytes"] for row in rows) == sum(row[3] for row in report.rows)
    # What is taken off stands by itself.
    taken = dataclasses.replace(report, rows=[*report.rows, ("donated", None, None, -8, None)])
    rows = taken.largest("bytes", 2).to_data()["rows"]
    assert [row["path"] for row in rows] == [*paths, "donated"]
    with pytest.raises(SelectionError):
        report.largest("byte", 2)


def test_truth_is_the_verdict():
    assert [bool(plan_report(ok=ok)) for ok in (None, True, False)] == [True, True, False]


# Comparisons


SENT = (PATH, Column("kind"), Column("count", "count"), BYTES)


def test_compare_has_one_row_for_each_value_that_differs():
    before = Report("sent", "", SENT, [("mlp", "all-gather", 2, 100), ("head", "all-reduce", 1, 8)])
    now = Report("sent", "", SENT, [("mlp", "all-gather", 3, 100), ("head", "all-gather", 1, 4)])
    difference = now.compare(before)
    assert not difference
    assert [(row[0], row[1], row[4], row[6]) for row in difference.rows] == [
        ("mlp", "count", "grew", False),
        ("head", "kind", "changed", None),
        ("head", "bytes", "shrank", True),
    ]
    assert difference.rows[0][5] == 0.5


def test_compare_by_several_columns_tells_what_is_new_and_what_is_gone():
    before, now = (
        Report("sent", "", SENT, [("mlp", kind, 2, 100)], key=("path", "kind"))
        for kind in ("all-gather", "all-reduce")
    )
    new, gone = now.compare(before).rows
    assert new == ("mlp", "all-reduce", "", "", "count 2, bytes 100 B", "new", None, False)
    assert gone == ("mlp", "all-gather", "", "count 2, bytes 100 B", "", "gone", None, True)


def test_compare_leaves_out_what_others_say_in_sentences():
    columns = (PATH, Column("remark", "detail"), Column("fits", "ok"))
    before, now = (Report("r", "", columns, [("mlp", text, text == "a")]) for text in "ab")
    assert now.compare(before)


def test_compare_adds_up_the_rows_of_one_name():
    whole = Report("sent", "", SENT, [("mlp", "all-gather", 2, 100)])
    halves = Report("sent", "", SENT, [("mlp", "all-gather", 1, 50)] * 2)
    assert halves.compare(whole)
    assert whole.compare(halves).verdict == whole.compare(whole).verdict


@pytest.mark.parametrize(("grown", "differs"), [(104, False), (106, True), (96, False), (94, True)])
def test_compare_allows_a_tolerance(grown, differs):
    before, now = (Report("sent", "", (PATH, BYTES), [("mlp", n)]) for n in (100, grown))
    assert bool(now.compare(before, tolerance=0.05)) is not differs
    assert not now.compare(before)
    # What prints alike is no difference.
    assert Report("", "", (PATH, BYTES), [("mlp", 2**28)]).compare(
        Report("", "", (PATH, BYTES), [("mlp", 2**28 + 64)])
    )


def test_compare_folds_equal_blocks_and_refuses_other_columns():
    before, now = (
        Report("sent", "", (PATH, BYTES), [(f"block_{i}/mlp", size) for i in range(12)])
        for size in (64, 128)
    )
    assert "block_{0-11}/mlp" in str(now.compare(before))
    with pytest.raises(SelectionError):
        now.compare(plan_report())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=6))
def test_compare_of_a_report_with_itself_finds_nothing(rows):
    report = Report("sent", "", (PATH, BYTES), rows)
    assert report.compare(report)
    assert not report.compare(Report("sent", "", (PATH, BYTES), [*rows, ("d", 1)]))
