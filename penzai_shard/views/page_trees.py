"""A report's tree as HTML: lines that unfold, each figure over a bar as long as its share."""

from collections.abc import Sequence

from penzai_shard.linting.findings import MARK
from penzai_shard.path_folding import folding_key, paths_in_ranges
from penzai_shard.report_trees import ReportTree, TreeFigure, TreeNode
from penzai_shard.views.markup import Markup, element, path_markup

# So many lines are open at first.
_LINES_OPEN = 30


class TreeMarkup:
    """A tree as HTML, and where in the page each of its paths is.

    Attributes:
        markup: The tree.
        anchors: What links to nodes call them, by ``place_of`` their paths.
    """

    def __init__(self, tree: ReportTree, section: str) -> None:
        self.anchors: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._count = 0
        self._section = section
        figures = (*tree.figures, *(figure for node in tree.walk() for figure in node.figures))
        self._names = list(dict.fromkeys(figure.name for figure in figures))
        self._opened = tree.opened(_LINES_OPEN)
        lines = [self._node(child, 1) for child in tree.children]
        self.markup = element("div", _heading(self._names), *lines, class_="tree")

    def _node(self, node: TreeNode, around: int) -> Markup:
        self._count += 1
        anchor = f"{self._section}-{self._count}"
        # Of blocks that are not all equal, a link to all goes to the most that are.
        place = place_of(node.path)
        if node.count > self._counts.get(place, 0):
            self._counts[place], self.anchors[place] = node.count, anchor
        line = self._line(node, around)
        below = [_detail(text) for text in node.details]
        below += [self._node(child, node.count) for child in node.children]
        if not below:
            return element("div", line, class_="leaf", id=anchor)
        return element(
            "details",
            element("summary", line),
            # Where a link goes to the inside of what is closed, the browser opens it.
            element("div", *below, class_="below", id=anchor),
            open=id(node) in self._opened,
        )

    def _line(self, node: TreeNode, around: int) -> Markup:
        times = node.times(around)
        judged = {None: "path", True: "path good", False: "path bad"}[node.ok]
        label = element(
            "span",
            element("span", path_markup(node.label), class_=judged),
            element("span", f" × {times:,}", class_="quiet") if times > 1 else None,
            element("span", f" {node.line}", class_="quiet") if node.line else None,
            class_="label",
            title=node.path,
        )
        figures = {figure.name: figure for figure in node.figures}
        cells = [_cell(name, figures.get(name), node.count) for name in self._names]
        return element("span", label, *cells, class_="line")


def place_of(path: str) -> str:
    """What paths have in common that differ in the numbers of equal blocks only.

    >>> place_of("lm/block_{1-11}/mlp") == place_of("lm/block_0/mlp")
    True
    """
    try:
        return folding_key(next(paths_in_ranges(path)))
    except ValueError:
        return folding_key(path)


def _detail(text: str) -> Markup:
    if not text.startswith(MARK):
        return element("p", text, class_="detail quiet")
    # One click selects it all, to be pasted.
    code = element("code", text.removeprefix(MARK))
    return element("p", MARK, code, class_="detail")


def _heading(names: Sequence[str]) -> Markup:
    cells = [element("span", name, class_="cell") for name in names]
    return element("div", element("span", class_="label"), *cells, class_="line head")


def _cell(name: str, figure: TreeFigure | None, count: int) -> Markup:
    """A figure of a node; an empty cell keeps the columns."""
    if figure is None:
        return element("span", class_="cell")
    exact = exact_text(figure.value, figure.unit)
    if count > 1:
        exact += f", {figure.each(count)} in each of {count:,}"
    share, style = "", None
    if figure.share is not None:
        share = f" {figure.share_text}"
        style = f"--share:{min(max(figure.share, 0.0), 1.0):.3f}"
    return element(
        "span",
        element("span", f"{name} ", class_="name"),
        element("b", figure.text),
        element("span", share, class_="share") if share else None,
        class_="cell" if style is None else "cell barred",
        style=style,
        title=exact,
    )


def exact_text(value: float, unit: str) -> str:
    """A number as it is, to the byte.

    >>> exact_text(2.0**20, "bytes"), exact_text(1200, "count")
    ('1,048,576 bytes', '1,200')
    """
    number = f"{value:,.0f}" if value == round(value) or unit == "bytes" else f"{value:,}"
    return f"{number} bytes" if unit == "bytes" else number
