"""Writes a report as a piece of HTML that needs no script and no other file."""

import html
import importlib.resources
import re
from collections.abc import Sequence

from penzai_shard.reports.quantities import plain_text
from penzai_shard.reports.report import Column, Report
from penzai_shard.reports.text import QUANTITIES, is_bad, row_details, table_cells
from penzai_shard.reports.tree import Node, Tree

_MOST_ROWS = 250
_FIGURE = re.compile(r"[\d.,]+ \w+")  # A number and its unit stay on one line.
_ARROW = '<span class="arrow">-&gt;</span>'  # Browsers break a line after a hyphen.


def write_table(report: Report) -> str:
    """The verdict, at most 250 rows, and the notes."""
    report = report.condense()
    columns, cells = table_cells(report)
    lines = [_write_row("th", columns, [column.name for column in columns])]
    for row, texts in list(zip(report.rows, cells, strict=True))[:_MOST_ROWS]:
        lines.append(_write_row("td", columns, texts, "bad" if is_bad(report, row) else ""))
        for detail in row_details(report, row):
            cell = f'<td class="quiet" colspan="{len(columns)}">{html.escape(detail)}</td>'
            lines.append(f"<tr>{cell}</tr>")
    table = f"<table>{''.join(lines)}</table>" if columns else ""
    hidden = len(report.rows) - _MOST_ROWS
    more = f"<div>and {hidden:,} more rows; print shows them</div>" if hidden > 0 else ""
    drawing = "<br>".join(
        "".join(f'<span class="{style}">{html.escape(text)}</span>' for text, style in line)
        for line in report.drawing(100)
    )
    return _section(report, table + more + (f"<pre>{drawing}</pre>" if drawing else ""))


def _write_row(tag: str, columns: Sequence[Column], texts: Sequence[str], style: str = "") -> str:
    cells = ""
    for column, text in zip(columns, texts, strict=True):
        side = "figure" if _FIGURE.fullmatch(text) else ""
        side = "number" if column.kind in QUANTITIES else side
        # Long paths break after a slash.
        shown = html.escape(text).replace("/", "/<wbr>").replace("-&gt;", _ARROW)
        cells += f'<{tag} class="{side}">{shown}</{tag}>'
    return f'<tr class="{style}">{cells}</tr>'


def write_tree(tree: Tree) -> str:
    """The verdict, the tree with its outermost nodes opened, and the notes."""
    nodes = (_write_node(tree, child, "open") for child in tree.root.children.values())
    return _section(tree.report, "".join(nodes))


def _write_node(tree: Tree, node: Node, state: str = "") -> str:
    line = f'<span class="{"bad" if node.is_bad else ""}">{html.escape(node.label)}</span>'
    if quantities := tree.quantities(node):
        line += f' <span style="{tree.shade(node)}">{html.escape(quantities)}</span>'
    line += "".join(f' <span class="quiet">{html.escape(text)}</span>' for text in node.texts)
    below = [_write_node(tree, child) for child in node.children.values()]
    below += [f'<div class="quiet">{html.escape(detail)}</div>' for detail in node.details]
    if not below:
        return f"<div>{line}</div>"
    return f"<details {state}><summary>{line}</summary>{''.join(below)}</details>"


def _section(report: Report, content: str) -> str:
    style = {True: "good", False: "bad", None: ""}[report.ok]
    verdict, *notes = [html.escape(plain_text(text)) for text in (report.verdict, *report.notes)]
    content = f'<div><strong class="{style}">{verdict}</strong></div>{content}'
    content += "".join(f'<div class="quiet">{note}</div>' for note in notes)
    # Each piece brings its style, as a notebook shows a piece by itself.
    css = importlib.resources.files(__package__).joinpath("report.css").read_text("utf-8")
    return f'<style>{css}</style><section class="pzs">{content}</section>'
