"""A page as HTML: one file with its style in it, no scripts, and nothing that is loaded."""

import importlib.resources
from collections.abc import Iterable, Iterator, Mapping

from penzai_shard.planning import ShardingPlan, bytes_text
from penzai_shard.report_trees import share_text
from penzai_shard.text_tables import Report
from penzai_shard.views.heavy_layers import HeavyLayer
from penzai_shard.views.markup import Markup, element, escaped, path_markup
from penzai_shard.views.page_content import KeyFigure, Missing, PageContent, Ranking
from penzai_shard.views.page_trees import TreeMarkup, exact_text, place_of

# Nothing but the page's own style: what a path or a name says is never run or loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_SIGNS = {"good": "✓ ", "bad": "✗ ", "": ""}


def page_html(content: PageContent) -> str:
    """The page; the same for the same content, byte by byte."""
    style = importlib.resources.files(__package__).joinpath("page.css").read_text("utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("link", rel="icon", href="data:,"),
        element("title", escaped(content.title + _where(content))),
        element("style", Markup(style)),
    )
    sections = [Section(title, shown) for title, shown in content.sections().items()]
    links = (element("li", element("a", each.title, href=f"#{each.key}")) for each in sections)
    body = element(
        "body",
        _headline(content, {each.key: each.anchors for each in sections}),
        element("nav", element("ul", *links), aria_label="Sections"),
        element("main", *(each.markup for each in sections)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


class Section:
    """A report as HTML, or why there is none.

    Attributes:
        title: Its title.
        key: What links to it call it.
        anchors: What links to the nodes of its tree call them, by ``place_of`` their paths.
        markup: The HTML.
    """

    def __init__(self, title: str, shown: ShardingPlan | Report | Missing) -> None:
        self.title = title
        self.key = title.lower()
        self.anchors: Mapping[str, str] = {}
        content = _missing(shown) if isinstance(shown, Missing) else self._of(shown)
        heading = element("h2", title, id=f"{self.key}-title")
        self.markup = element(
            "section", heading, *content, id=self.key, aria_labelledby=f"{self.key}-title"
        )

    def _of(self, report: ShardingPlan | Report) -> Iterator[Markup]:
        table = report.notebook_table()
        yield element("p", table.text_verdict(), class_=table.verdict_style())
        if notes := table.text_summary():
            yield _notes(notes)
        rows = element("div", Markup(table.html_rows()), class_="scrolled", tabindex="0")
        tree = report.tree()
        if tree is None or not tree.children:
            yield rows
            return
        shown = TreeMarkup(tree, self.key)
        self.anchors = shown.anchors
        yield shown.markup
        yield element("details", element("summary", "The same as a table"), rows)


def _where(content: PageContent) -> str:
    return f" on mesh ({content.mesh})" if content.mesh else ""


def _headline(content: PageContent, anchors: Mapping[str, Mapping[str, str]]) -> Markup:
    title = element("span", content.title)
    where = element("small", _where(content)) if content.mesh else None
    state, verdict = content.verdict()
    rankings = (_ranking(each, anchors.get(each.section, {})) for each in content.rankings())
    return element(
        "header",
        element("h1", title, where),
        element("p", _SIGNS[state] + verdict, class_=f"verdict {state}".strip()),
        element("ul", *map(_key_figure, content.key_figures()), class_="figures"),
        element("div", *rankings, class_="rankings"),
        *([_notes(content.notes)] if content.notes else []),
    )


def _key_figure(figure: KeyFigure) -> Markup:
    bar = None if figure.share is None else _bar(figure.share, figure.state)
    return element(
        "li",
        element(
            "a",
            element("span", figure.name),
            element("b", figure.text, class_=figure.state or None, title=figure.exact or None),
            bar,
            element("span", figure.remark, class_="quiet"),
            href=f"#{figure.section}",
        ),
    )


def _ranking(ranking: Ranking, anchors: Mapping[str, str]) -> Markup:
    more = None
    if ranking.rest:
        link = element("a", f"and {ranking.rest} more", href=f"#{ranking.section}")
        more = element("p", link, class_="what")
    rows = [
        _heavy_layer(layer, anchors.get(place_of(layer.layer), ranking.section))
        for layer in ranking.layers
    ]
    nothing = None if ranking.layers else element("p", "Nothing.", class_="quiet")
    return element("section", element("h2", ranking.title), nothing, element("ol", *rows), more)


def _heavy_layer(layer: HeavyLayer, anchor: str) -> Markup:
    size = f"{bytes_text(round(layer.bytes))}, {share_text(layer.share, 1.0)}"
    return element(
        "li",
        element(
            "div",
            element("a", path_markup(layer.layer), class_="path", href=f"#{anchor}"),
            element("b", size, class_="amount", title=exact_text(layer.bytes, "bytes")),
            class_="row",
        ),
        _bar(layer.share),
        element("div", layer.what, class_="what quiet"),
    )


def _bar(share: float, state: str = "") -> Markup:
    """A bar for the eyes alone: what it shows stands beside it in words."""
    width = f"width:{min(max(share, 0.0), 1.0):.1%}"
    return element(
        "div", element("i", style=width), class_=f"bar {state}".strip(), aria_hidden="true"
    )


def _missing(shown: Missing) -> Iterator[Markup]:
    yield element("p", shown.reason)
    if shown.problems:
        yield _notes(shown.problems)


def _notes(notes: Iterable[str]) -> Markup:
    return element("ul", *(element("li", note) for note in notes), class_="notes")
