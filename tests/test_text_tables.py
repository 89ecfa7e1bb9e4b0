"""Tables break at spaces and slashes, are plain text as strings, and have a view in notebooks."""

import dataclasses
import html.parser
import io
import re
import sys

import pytest
import treescope
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penzai_shard import text_tables
from penzai_shard.text_tables import PreparedTable, TextTable

PATHS = [
    f"transformer/block_{i}/{name}"
    for i in (0, 11)
    for name in ("pre_attention_norm/scale.weights", "attention/query/Linear.weights")
]


@dataclasses.dataclass(frozen=True, repr=False)
class Table(TextTable):
    headings = ("array", "count", "axes", "reason")
    right_aligned = frozenset({"count"})
    paths = frozenset({"array"})
    below = "reason"
    wide = 90

    rows: tuple = ()
    verdict: str = "all is well"
    notes: tuple = ()

    def text_rows(self):
        return self.rows

    def text_verdict(self):
        return self.verdict

    def text_summary(self):
        return self.notes

    def style_of(self, row, heading):
        return "green" if heading == "count" else ""


LONG = Table(
    tuple(
        (path, "12", "embedding=128/data, neurons=384/model", "because it fits") for path in PATHS
    )
)


def words(text):
    """What may not be broken: pieces between spaces, and in paths between slashes."""
    return [word for word in re.split(r"\s+|(?<=/)", text) if word and not re.fullmatch("-+", word)]


def as_printed(table, width):
    return table.plain_text(width)


def through_rich(table, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("shown_by", [as_printed, through_rich])
def test_no_word_is_broken_and_no_line_is_too_long(shown_by, width):
    text = shown_by(LONG, width)
    assert max(map(len, text.splitlines())) <= width
    expected = words(" ".join(cell for row in LONG.rows for cell in row))
    shown = words(text)
    assert set(expected) <= set(shown)
    # The path of each row can be read off in one piece where it has a line of its own.
    if width <= 80:
        assert all(path in text.splitlines() for path in PATHS)


def test_a_path_breaks_after_a_slash_only():
    text = Table((("model/" + "a" * 40 + "/" + "b" * 40, "1", "x", "y"),)).plain_text(60)
    lines = [line.strip() for line in text.splitlines()]
    assert "model/" + "a" * 40 + "/" in lines
    assert "b" * 40 in lines


def test_a_word_that_is_wider_than_the_table_is_left_whole():
    text = Table((("w" * 70, "1", "v" * 70, "u" * 70),)).plain_text(40)
    for letter in "wvu":
        assert letter * 70 in text


@given(
    st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8"), max_size=40) for _ in range(4)]),
        max_size=5,
    ),
    st.integers(1, 200),
)
def test_any_text_at_any_width_is_shown_whole_and_without_control_characters(rows, width):
    text = Table(tuple(rows)).plain_text(width)
    assert all(c.isprintable() or c == "\n" for c in text)
    shown = "".join(text.split())
    for row in rows:
        for cell in row:
            for word in "".join(map(text_tables.printable, cell)).split():
                for part in re.split("(?<=/)", word):
                    assert part in shown


def test_the_verdict_is_the_first_line():
    assert LONG.plain_text(200).splitlines()[0] == "all is well"
    assert LONG.plain_text(200).splitlines()[1].split() == ["array", "count", "axes", "reason"]


def test_text_is_plain_in_a_terminal_too(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert str(LONG) == repr(LONG) == LONG.plain_text(80)
    assert "\x1b" not in str(LONG)


def test_rich_prints_the_same_text_with_colours():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    console.print(LONG)
    written = console.file.getvalue()
    assert "\x1b[32m" in written
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert [line.rstrip() for line in plain.splitlines()] == LONG.plain_text(80).splitlines()


class Cells(html.parser.HTMLParser):
    """Reads a piece of HTML strictly: the texts of its elements, each of which must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.order = [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag != "wbr":
            self.open.append(tag)
            if tag in ("td", "th", "div"):
                self.texts.setdefault(tag, []).append("")
                self.order.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in reversed(self.open):
            if tag in self.texts and tag in ("td", "th", "div"):
                self.texts[tag][-1] += data
                break


def test_html_shows_the_verdict_first_then_every_cell_then_the_notes():
    read = Cells(dataclasses.replace(LONG, notes=("a note",))._repr_html_())
    assert read.texts["div"] == ["all is well", "a note"]
    assert read.order[0] == "div"
    assert read.texts["th"] == list(Table.headings)
    assert read.texts["td"] == [cell for row in LONG.rows for cell in row]


def test_html_escapes_whatever_the_names_hold():
    evil = "</td><script>alert(1)</script>&amp;\"'\x1b[31m"
    text = Table(((evil, evil, evil, evil),), verdict=evil, notes=(evil,))._repr_html_()
    assert "<script" not in text
    assert "\x1b" not in text
    read = Cells(text)
    shown = evil.replace("\x1b", "\\x1b")
    assert read.texts["td"] == [shown] * 4
    assert read.texts["div"] == [shown] * 2


def test_html_needs_nothing_from_elsewhere_and_fits_light_and_dark_pages():
    text = LONG._repr_html_()
    assert not re.search(r"https?:|src=|<script|<link|@import|url\(", text)
    # Colours of the page; what has one of its own is a middle tone.
    assert "background:none" in text
    assert set(re.findall(r"color:([^;\"}]+)", text)) == {"inherit", "#2a9d4a"}


def test_long_texts_keep_a_width_that_can_be_read_on_narrow_pages():
    text = Table((("a" * 61, "1", "x " * 40, "short"),))._repr_html_()
    assert ".w{min-width:14em}" in text
    assert re.findall(r'<td(?: class="([^"]*)")?', text) == ["w", "r n", "w", ""]


def test_what_a_narrow_table_shows_below_a_row_of_many_cells_a_page_shows_there_too():
    class Many(PreparedTable):
        headings = ("a", "b", "c", "d", "e", "f", "why")
        below = "why"

    read = Cells(text := Many((("1", "2", "3", "4", "5", "6", "because"),))._repr_html_())
    assert read.texts["th"] == ["a", "b", "c", "d", "e", "f"]
    assert read.texts["td"] == ["1", "2", "3", "4", "5", "6", "because"]
    assert '</tr><tr><td colspan="6" class="b">' in text


def test_a_notebook_shows_a_part_of_a_very_long_table_and_says_so():
    table = Table(tuple((f"block_{i}/w", "1", "x", "y") for i in range(10_000)))
    text = table._repr_html_()
    assert len(text) < 200_000
    assert "and 9,750 more rows; print shows them all" in text
    assert "block_9999/w" in table.plain_text()


def test_inside_another_value_treescope_shows_the_verdict_and_little_more():
    assert treescope.render_to_text({"plan": LONG}) == "{'plan': <Table: all is well>}"
    assert len(treescope.render_to_html({"plan": LONG})) < 50_000
