"""A report's tree in treescope: nodes that fold, with bars for shares and figures on hovering."""

from collections.abc import Iterator
from typing import Any

from treescope import rendering_parts as parts
from treescope import type_registries

from penzai_shard.library_apis.treescope_api import StyledPart
from penzai_shard.report_trees.nodes import ReportTree, TreeFigure, TreeNode

# Bars have so many lengths, so that their styles are few.
_STEPS = 20
# So many lines are open at first.
_LINES_OPEN = 24


def treescope_part(tree: ReportTree, path: str | None = None) -> Any:
    """What ``__treescope_repr__`` of a report returns.

    Args:
        tree: The report's tree.
        path: Where the report is in what treescope renders.
    """
    heading = parts.siblings(
        parts.text(f"<{tree.kind}: "),
        _styled(_judged(parts.text(tree.verdict), tree.ok), "pzs-verdict"),
    )
    below = [_remark(note) for note in tree.notes]
    if not tree.children and not below:
        return parts.build_one_line_tree_node(parts.siblings(heading, parts.text(">")), path)
    opened = tree.opened(_LINES_OPEN)
    return parts.build_foldable_tree_node_from_children(
        prefix=heading,
        children=[*(_node(child, 1, opened) for child in tree.children), *below],
        suffix=parts.text(">"),
        path=path,
        expand_state=parts.ExpandState.EXPANDED,
    )


def _node(node: TreeNode, around: int, opened: set[int]) -> Any:
    """One node.

    Args:
        node: The node.
        around: How many places the node around it stands for.
        opened: The nodes that are open at first, by their identity.
    """
    line = _line(node, around)
    below = [_remark(text) for text in node.details]
    below += [_node(child, node.count, opened) for child in node.children]
    if not below:
        return parts.build_one_line_tree_node(line)
    is_open = id(node) in opened
    return parts.build_custom_foldable_tree_node(
        label=line,
        # Closed, it is its line alone.
        contents=parts.fold_condition(expanded=parts.indented_children(below)),
        expand_state=parts.ExpandState.EXPANDED if is_open else parts.ExpandState.COLLAPSED,
    )


def _line(node: TreeNode, around: int) -> Any:
    pieces = [_judged(parts.text(node.title(around)), node.ok)]
    for figure in node.figures:
        pieces += [parts.text("  "), _bar(figure, node.times(around))]
    if node.line:
        pieces += [parts.text("  "), _styled(parts.text(node.line), "pzs-line")]
    return _styled(parts.siblings(*pieces), "pzs-node", "\n".join((node.path, *_sentences(node))))


def _bar(figure: TreeFigure, times: int) -> Any:
    """A figure over a bar as long as its share, which is the stronger the longer it is."""
    step = round((figure.share or 0) * _STEPS)
    return _styled(parts.text(figure.described(times)), f"pzs-bar pzs-bar-{step}")


def _judged(part: Any, ok: bool | None) -> Any:
    return part if ok is None else _styled(part, "pzs-good" if ok else "pzs-bad")


def _sentences(node: TreeNode) -> Iterator[str]:
    """The figures of a node in words, of equal blocks also those of each."""
    for figure in node.figures:
        text = f"{figure.name}: {figure.text}"
        if figure.share is not None:
            text += f", {figure.share_text} of the whole"
        if node.count > 1 and figure.unit != "count":
            text += f"; each of {node.count}: {figure.each(node.count)}"
        yield text


def _remark(text: str) -> Any:
    return _styled(parts.text(f"# {text}"), "pzs-line pzs-long")


def _styled(part: Any, classes: str, title: str = "") -> Any:
    return StyledPart(part, classes, _RULES, title)


def _bar_rules() -> Iterator[str]:
    """From pale to strong, over what is there: to be read on light and on dark pages."""
    for step in range(_STEPS + 1):
        share = step / _STEPS
        full, rest = f"rgba(230,126,34,{0.25 + 0.4 * share:.2f})", "rgba(128,128,128,.14)"
        end = f"{share:.0%}"
        yield f".pzs-bar-{step}{{background:linear-gradient(90deg,{full} {end},{rest} {end})}}"


# Of a page with several trees it is there once.
_RULES = "".join(
    (
        ".pzs-bar{border-radius:.25em;padding:0 .4em}",
        ".pzs-line{opacity:.7}",
        # Treescope breaks no lines itself.
        ".pzs-verdict{white-space:pre-wrap}",
        ".pzs-long{display:inline-block;max-width:min(110ch,90vw);white-space:pre-wrap;"
        "vertical-align:top}",
        ".pzs-good{color:#2a9d4a}",
        ".pzs-bad{color:#e5484d;font-weight:600}",
        *_bar_rules(),
    )
)


def _show_tree(tree: ReportTree, path: str | None, subtree_renderer: Any) -> Any:
    del subtree_renderer
    return treescope_part(tree, path)


# A tree is data that knows of no view.
type_registries.TREESCOPE_HANDLER_REGISTRY[ReportTree] = _show_tree
