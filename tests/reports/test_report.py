"""One report, many views: the same numbers in all of them, at any width, whatever the text."""

import html.parser
import io
import json
import re

import numpy as np
import pytest
import rich.console
import treescope
from hypothesis import given
from hypothesis import strategies as st

from penzai_shard.errors import SelectionError
from penzai_shard.reports import Column, HasReport, Report

PATH = Column("path", "path")
BYTES = Column("bytes", "bytes")
WIDTHS = (40, 60, 80, 100, 120)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e\n"


def plan_report(blocks=12, **fields):
    columns = (PATH, Column("names"), Column("dtype"), BYTES, Column("parameters", "count"))
    rows = [("embedder/table", ("vocabulary", "embedding"), "float32", 2**20, 2**18)]
    for block in range(blocks):
        for name, size in (("attention/query", 2**12), ("attention/key", 2**11), ("norm", 2**6)):
            axes = ("embedding", name.rpartition("/")[2])
            rows.append((f"decoder/block_{block}/{name}/weights", axes, "float32", 4 * size, size))
    return Report(
        "Plan", f"{len(rows)} arrays", columns, rows, ["One rule fits nothing."], **fields
    )


def treescope_page(value):
    return treescope.render_to_html(value, compressed=False)


class Page(html.parser.HTMLParser):
    """The tags, the attributes and the text of a page; each cell of a table is one text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open_tags = set(), set(), [""], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in ("wbr", "br"):
            self.open_tags.append(tag)
            self.texts.append("")

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag
        self.texts.append("")

    def handle_data(self, data):
        self.texts[-1] += data


def test_views_show_the_same_numbers():
    report = plan_report()
    # By hand: 12 folded blocks, and 1 MiB of embeddings over 1.29 MiB.
    sizes = {"embedder/table": "1.0 MiB", "query": "192.0 KiB", "norm": "3.0 KiB"}
    for view in (
        str(report),
        str(report.tree()),
        " ".join(Page(report._repr_html_()).texts),
        " ".join(Page(report.tree()._repr_html_()).texts),
        treescope_page(report),
    ):
        for path, size in sizes.items():
            assert re.search(rf"{path}.*?{size}", view, re.DOTALL)
    parameters = sum(row["parameters"] for row in report.to_data()["rows"])
    assert f"bytes {4 * parameters / 2**20:.1f} MiB (100%)" in treescope_page(report)
    rows = json.loads(report.to_json())["rows"]
    assert sum(row["bytes"] for row in rows if "query" in row["path"]) == 192 * 2**10
    assert sum(row["bytes"] for row in rows if "norm" in row["path"]) == 3 * 2**10


def test_rich_writes_the_lines_of_print(monkeypatch):
    report = plan_report(ok=False)
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        plain, coloured = io.StringIO(), io.StringIO()
        rich.console.Console(file=plain, width=width).print(report)
        assert [line.rstrip() for line in plain.getvalue().splitlines()] == str(report).splitlines()
        rich.console.Console(file=coloured, width=width, force_terminal=True).print(report)
        assert "\x1b[1;31m37 arrays" in coloured.getvalue()


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


def test_table_too_narrow_for_columns_becomes_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = str(plan_report()).splitlines()
    assert "    bytes: 192.0 KiB" in lines
    assert "decoder/block_{0-11}/attention/query/" in lines
    monkeypatch.setenv("COLUMNS", "100")
    assert "bytes:" not in str(plan_report())


def test_word_wider_than_the_width_is_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    word = "p" * 70
    assert word in str(Report("Words", word, (PATH, BYTES), [(word, 1)]))


def test_equal_blocks_fold_unless_one_differs():
    report = plan_report()
    assert "decoder/block_{0-11}/norm/weights" in str(report)
    assert "block_3/" in str(report.table(collapse=False))
    assert "block_3/" in str(report.tree(collapse=False))
    assert "block_{0-11}" not in treescope_page(report.table(collapse=False))
    assert "  x 12" not in str(report.tree())
    rows = [
        (path, ("embedding", None), *values) if "block_3/norm" in path else (path, names, *values)
        for path, names, *values in report.rows
    ]
    folded = str(Report("Plan", "", report.columns, rows))
    assert "block_{0-2,4-11}/norm" in folded
    assert "block_3/norm" in folded
    assert "block_{0-11}/attention/key" in folded


def test_column_that_says_one_thing_becomes_a_note():
    text = str(plan_report())
    assert "In all rows: dtype float32." in text
    header = text.splitlines()[1].split()
    assert header == ["path", "x", "names", "bytes", "parameters"]
    assert str(plan_report(0)).splitlines()[1].split()[1:3] == ["names", "dtype"]
    assert all(row["dtype"] == "float32" for row in plan_report().to_data()["rows"])


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
    assert "hidden 1.0 KiB" in str(report.tree())
    assert report.to_data()["rows"][0]["hidden"] == 1024


def test_json_round_trip():
    columns = (PATH, Column("dtype"), Column("shape"), BYTES)
    row = ("w", np.dtype("float32"), (2, 3), np.int64(24))
    report = Report("Data", "1 array", columns, [row], ["Note."], True, {"mesh": {"data": 2}})
    assert json.loads(report.to_json()) == {
        "title": "Data",
        "verdict": "1 array",
        "ok": True,
        "mesh": {"data": 2},
        "rows": [{"path": "w", "dtype": "float32", "shape": [2, 3], "bytes": 24}],
        "notes": ["Note."],
    }


def test_hostile_text_is_harmless():
    columns = (PATH, Column("says"), Column("why", "detail"), BYTES)
    rows = [(f"{HOSTILE}/{n}", f"{n}{HOSTILE}", HOSTILE, 1) for n in ("a", "b")]
    report = Report(HOSTILE, HOSTILE, columns, rows, [HOSTILE])
    for text in (str(report), str(report.tree()), treescope_page(report), report._repr_html_()):
        assert not set("\x1b\u202e") & set(text)
    assert len(str(report.table(collapse=False)).splitlines()) < 40
    for view in (report, report.tree()):
        page = Page(view._repr_html_())
        allowed = "style section div strong table tr th td wbr br details summary span"
        assert page.tags <= set(allowed.split())
        assert page.attributes <= {"class", "style", "colspan", "open"}
        assert page.open_tags == []
        assert "onerror=alert(2)" in "".join(page.texts)
    assert "<script>alert" not in treescope_page(report)
    assert "<img" not in treescope_page(report)


def test_table_in_html_has_at_most_250_rows():
    rows = [(f"layer{'abcdefghij'[n % 10]}{'x' * n}", n) for n in range(300)]
    page = Report("Long", "", (PATH, BYTES), rows)._repr_html_()
    assert page.count("<tr") == 251
    assert "50 more rows" in page


def test_treescope_page_is_small_and_folds_blocks():
    report = plan_report(53)
    assert len(report.rows) == 160
    assert len(treescope.render_to_html(report)) < 40_000
    page = treescope_page({"plan": report})
    assert len(page) < 40_000
    assert "block_{0-52}/" in page
    # What the copy button gives.
    assert "data-copy=\"['plan']\"" in page


def test_tree_nests_sums_and_merges():
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
    assert "a/b/c  bytes 10 B (5%)" in str(
        Report("Tree", "", (PATH, BYTES), [("a/b/c", 10)], wholes={"bytes": 200}).tree()
    )


def test_tree_shows_each_row_of_one_path():
    rows = [("mlp", "all-gather", 4), ("mlp", "all-reduce", 12), ("head", "all-reduce", 16)]
    tree = Report("Collectives", "3", (PATH, Column("kind"), BYTES), rows).tree()
    assert str(tree).splitlines()[1:] == [
        "mlp  bytes 16 B (50%)",
        "  all-gather  bytes 4 B (12%)",
        "  all-reduce  bytes 12 B (38%)",
        "head  bytes 16 B (50%)  all-reduce",
    ]


def test_largest_sums_up_the_rest():
    report = plan_report()
    largest = report.largest("bytes", 2)
    paths = [row["path"] for row in largest.to_data()["rows"]]
    assert paths[:2] == ["embedder/table", "decoder/block_{0-11}/attention/query/weights"]
    for name in ("bytes", "parameters"):
        total = sum(row[name] for row in report.to_data()["rows"])
        assert sum(row[name] for row in largest.to_data()["rows"]) == total
    assert largest.to_data()["rows"][2]["x"] == 24
    assert largest.to_data()["rows"][2]["names"] is None
    assert len(report.largest("bytes", 9).rows) == 4
    with pytest.raises(SelectionError):
        report.largest("byte", 2)


@pytest.mark.parametrize(("ok", "truth"), [(None, True), (True, True), (False, False)])
def test_truth_is_the_verdict(ok, truth):
    assert bool(Report("Truth", "", ok=ok)) is truth


def test_value_with_a_report_has_all_views():
    class Plan(HasReport):
        def report(self):
            return plan_report()

    plan, report = Plan(), plan_report()
    assert str(plan) == repr(plan) == str(report)
    assert str(plan.tree()) == str(report.tree())
    assert plan._repr_html_() == report._repr_html_()
    assert plan.to_json() == report.to_json()
    assert "block_{0-11}/" in treescope_page(plan)
    assert len(plan.table(collapse=False).folded().rows) == 37
