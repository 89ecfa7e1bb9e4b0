"""Writes one page about a layout: verdict, figures, plan, findings, memory, collectives, and why.

The page is one HTML file without scripts that loads nothing. What it shows are the reports of other
rooms; what could not be found out stands in its section in the words of the error.
"""

import contextlib
import html
import importlib.resources
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penzai import pz

from penzai_shard import errors
from penzai_shard.causes.why import WhyReport, why
from penzai_shard.errors import Problem
from penzai_shard.findings.lint import LintReport, lint
from penzai_shard.inspection.collectives import CollectiveReport
from penzai_shard.inspection.compiling import CompiledStep, compile_step
from penzai_shard.inspection.memory import MemoryReport
from penzai_shard.layouts.layout import Layout
from penzai_shard.meshes import AnyMesh, axis_sizes, mesh_text
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import make_plan
from penzai_shard.reports.html import write_tree
from penzai_shard.reports.quantities import bytes_text, plain_text
from penzai_shard.reports.report import Column, HasReport, Report
from penzai_shard.reports.tree import Node
from penzai_shard.rules import OnIndivisible

# Trees of more rows are not written, so that a page stays below 2 MB (measured: 200 bytes a row);
# a table ends by itself.
_MOST_TREE_ROWS = 3000
_LARGEST = 3
# What is said first of these sections: the nodes with most of some columns together.
_RANKED = {
    "Memory": ("Most memory", ("per device", "at the peak")),
    "Collectives": ("Most traffic", ("sent",)),
}
# These are taken off, or said once more by layer: the temporaries at the peak.
_NOT_RANKED = {"donated", "temporaries", "unused"}
# Whatever a name says, nothing of it is run or loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STATES = {True: "good", False: "bad", None: ""}
# In the order of the page.
_Sections = Mapping[str, HasReport]


def report(
    model: Any,
    mesh: AnyMesh,
    rules: Any,
    step: Any = None,
    *args: Any,
    path: str | os.PathLike[str] = "report.html",
    on_indivisible: OnIndivisible = "error",
    **kwargs: Any,
) -> pathlib.Path:
    """Writes one page about a layout: what each device holds and sends, what is wrong, and why.

    The page is a single HTML file, which opens from disk and loads nothing. The step is compiled
    and not run. Rules that do not fit are said on the page.

    Args:
        model: A model or a train state, concrete or abstract.
        mesh: The mesh, concrete or abstract.
        rules: What ``make_plan`` takes, or a ``Layout``. Arrays without names are replicated.
        step: As for ``compile_step``, or what that or ``compile_ahead`` gave. Without one the page
            has the plan and the findings.
        *args: What the step is called with, concrete or abstract.
        path: The file; one that is there is replaced, by the whole page or not at all.
        on_indivisible: As for ``make_plan``.
        **kwargs: What the step is called with by keyword. If the model can be called with those
            that are named arrays, the findings are also about what flows through it.

    Returns:
        The file. The same input gives the same bytes.

    Raises:
        RuleTypeError: There is no mesh, no model or no step.
        MeshError: The step is on another mesh.
        ShardingError: The file cannot be written; or as ``compile_step``.

    >>> import tempfile
    >>> import penzai_shard as pzs
    >>> from penzai import pz
    >>> mesh = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
    >>> model = {"up": pz.nx.ones({"embedding": 8, "neurons": 16})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(model, mesh, {"neurons": "model"}, path=f"{folder}/report.html")
    ...     page.read_text().count("<h2")
    5
    """
    arguments.read("report", mesh, {}, on_indivisible=on_indivisible)
    arguments.check_tree("report", model)

    options: Any = {"on_indivisible": on_indivisible, "on_unnamed": "replicate"}
    # What warnings say, the findings say.
    quiet = warnings.catch_warnings(action="ignore", category=errors.ShardingWarning)
    with _replace_file(path) as file, quiet:
        plan = _attempt(lambda: _plan(model, mesh, rules, options), errors.ShardingError)
        findings = _find(model, mesh, rules, kwargs, options)
        sections = {"Plan": plan, "Findings": findings, **_read_step(step, mesh, args, kwargs)}
        title = f"{type(model).__name__} on mesh ({mesh_text(mesh)})"
        file.write_text(_write_page(title, sections), encoding="utf-8")
    return pathlib.Path(path)


@contextlib.contextmanager
def _replace_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A new file, which takes its place once it is whole."""
    # Before a step is compiled, which may take minutes.
    try:
        file = pathlib.Path(path)
        if file.exists() and not file.is_file():
            raise FileExistsError(f"{str(file)!r} is a folder or a device")
        new = file.with_name(f".{file.name}.{os.getpid()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        new.touch()
    except (OSError, TypeError, ValueError) as error:
        problem = Problem("path", f"no page can be written: {error}", "Write path='report.html'.")
        raise errors.ShardingError("report:", [problem]) from error
    try:
        yield new
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _plan(model: Any, mesh: AnyMesh, rules: Any, options: Any) -> ShardingPlan:
    if isinstance(rules, Layout):
        return rules.plan(model, mesh, **options)
    return make_plan(model, mesh, rules, **options)


def _find(model: Any, mesh: AnyMesh, rules: Any, inputs: Any, options: Any) -> LintReport:
    """The findings, with the inputs of the step as the batch, if the model takes them."""
    named = {name: x for name, x in inputs.items() if isinstance(x, pz.nx.NamedArray)}
    found = lint(model, mesh, rules, batch=named or None, **options)
    # A loss may call the model with something else.
    is_called = "uncallable" not in (one.kind for one in found.findings)
    return found if is_called else lint(model, mesh, rules, **options)


def _attempt(make: Callable[[], HasReport], error_type: type[errors.ShardingError]) -> HasReport:
    """A report, or the words of the error in its place."""
    try:
        return make()
    except error_type as error:
        headline, *lines = str(error).splitlines()
        rows = [(line.strip(),) for line in lines]
        return Report("", headline, [Column("problem")] if rows else (), rows, ok=False)


def _read_step(step: Any, mesh: AnyMesh, args: Any, kwargs: Any) -> dict[str, HasReport]:
    """The sections about a step."""
    titles = ("Memory", "Collectives", "Why")
    # Arguments without a step are refused by what compiles it.
    if step is None and not (args or kwargs):
        verdict = "no step is given: report(model, mesh, rules, step, ...)"
        return dict.fromkeys(titles, Report("", verdict))
    compiled = _attempt(lambda: compile_step(step, *args, **kwargs), errors.CompilationError)
    if not isinstance(compiled, CompiledStep):
        return dict.fromkeys(titles, compiled)
    own = compiled.step.mesh
    if own is None or axis_sizes(own) != axis_sizes(mesh):
        where = "on no mesh" if own is None else f"on mesh ({mesh_text(own)})"
        what = f"the arrays of the step are {where}, and the page is of mesh ({mesh_text(mesh)})"
        fix = "Give the mesh of the step, or place its arrays on this one."
        raise errors.MeshError("report:", [Problem("", what, fix)])
    # Of a step that is too large the compiler gives no program.
    collectives = _attempt(lambda: compiled.collectives, errors.ProgramError)
    causes = _attempt(lambda: why(compiled), errors.PropagationError)
    sections = {"Memory": compiled.memory, "Collectives": collectives}
    if isinstance(causes, WhyReport) and isinstance(collectives, CollectiveReport):
        because = causes.collectives()
        sections |= {"Because": because, "Rules": because.by_rule()}
    return {**sections, "Why": causes}


# The page


def _write_page(title: str, sections: _Sections) -> str:
    style = importlib.resources.files(__package__).joinpath("page.css").read_text("utf-8")
    largest, written, links, figures = "", "", "", ""
    for name, section in sections.items():
        ranking, content = _write_section(name, section.report())
        largest += ranking
        written += f'<h2 id="{name.lower()}">{name}</h2>{content}'
        links += f'<a href="#{name.lower()}">{name}</a>'
    state, verdict, found = _summarise(sections)
    for name, link, text, remark, own in found:
        figures += f'<a href="#{link}">{name}<b class="{own}">{text}</b>{_escape(remark)}</a>'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{_escape(title)}</title><style>
{style}</style></head><body>
<header><h1>{_escape(title)}</h1><p class="verdict {state}">{_escape(verdict)}</p>
<div class="figures">{figures}</div><div class="largest">{largest}</div></header>
<nav>{links}</nav><main>{written}</main></body></html>
"""


def _escape(text: str) -> str:
    return html.escape(plain_text(text))


def _summarise(sections: _Sections) -> tuple[str, str, Sequence[tuple[str, ...]]]:
    """What is seen first: a state, a verdict, and figures.

    Returns:
        Whether all is well, as far as that is known; a sentence that says so; and of each figure
        its heading, section, text, remark and state.
    """
    plan, memory, sent = (sections[name] for name in ("Plan", "Memory", "Collectives"))
    state, verdict = "bad", "There is no valid layout."
    needed = moved = stored = ("-", "not known", "")
    if isinstance(plan, ShardingPlan):
        whole, held = bytes_text(plan.total_bytes), bytes_text(plan.bytes_per_device)
        stored = held, f"of {whole}; replicated {bytes_text(plan.replicated_bytes)}", ""
        state, verdict = "", f"Each device holds {held} of {whole}."
    if isinstance(memory, MemoryReport):
        limit = "of an unknown limit"
        if memory.limit is not None:
            limit = f"{memory.total / memory.limit:.0%} of {bytes_text(memory.limit)}"
        needed = bytes_text(memory.total), limit, _STATES[memory.fits]
        if isinstance(plan, ShardingPlan):
            state, verdict = _STATES[memory.fits], f"The step {memory.report().verdict}."
    elif memory.report().ok is False:
        state, verdict = "bad", f"The step cannot be compiled. {verdict}"
    if isinstance(sent, CollectiveReport):
        count = sent.total.count
        moved = bytes_text(sent.wire_bytes), f"in {count:,} collective{'s' * (count != 1)}", ""
    rows = sections["Findings"].report().rows
    if rows:
        state = state.replace("good", "")
        verdict += f" There {'is 1 finding' if len(rows) == 1 else f'are {len(rows)} findings'}."
    kinds = ", ".join(dict.fromkeys(row[1] for row in rows)) or "nothing found"
    figures = [
        ("Memory per device", "memory", *needed),
        ("Sent per device and step", "collectives", *moved),
        ("Stored per device", "plan", *stored),
        ("Findings", "findings", f"{len(rows):,}", kinds, "bad" if rows else "good"),
    ]
    return state, verdict, figures


def _write_section(name: str, report: Report) -> tuple[str, str]:
    """What is largest in a report, for the head of the page; and the report."""
    is_nested = name in ("Plan", *_RANKED) and report.rows and report.columns[0].kind == "path"
    if not is_nested or len(report.fold().rows) > _MOST_TREE_ROWS:
        return "", report._repr_html_()
    tree, ranking = report.tree(), ""
    if name in _RANKED:
        heading, columns = _RANKED[name]
        whole = tree.root.sums.get(columns[0]) or 1
        for number, (path, node, size) in enumerate(_find_largest(tree.root, columns)):
            node.anchor = f"{name.lower()}-{number}"
            link = f'<a href="#{node.anchor}">{_escape(path)}</a>'
            ranking += f"<p>{link}<span>{bytes_text(size)}, {size / whole:.0%}</span></p>"
            ranking += f'<div class="bar" style="width: {min(size / whole, 1):.1%}"></div>'
        ranking = f"<div><h3>{heading}</h3>{ranking or 'Nothing.'}</div>"
    return ranking, write_tree(tree)


_Share = tuple[str, Node, float]


def _find_largest(root: Node, columns: Sequence[str]) -> list[_Share]:
    """Path, node and size of those with most of some columns."""

    def measure(node: Node) -> float:
        return sum(node.sums.get(column, 0) for column in columns)

    def split(path: str, node: Node, size: float) -> list[_Share]:
        """A node; or what is below it, if that is more than half of all."""
        # Several rows of one path are below it, and have no path of their own.
        is_one = len(node.children) < 2 or any(key[0] == "/" for key in node.children)
        if is_one or size <= whole / 2:
            return [(path.rstrip("/."), node, size)]
        below = [(path + one.label, one, measure(one)) for one in node.children.values()]
        return [found for one in below for found in split(*one)]

    skipped = _NOT_RANKED if columns[-1] in root.sums else _NOT_RANKED - {"temporaries"}
    sizes = {name: measure(node) for name, node in root.children.items()}
    if "outputs" in sizes:
        # They take the memory of donated arrays before other memory.
        sizes["outputs"] += sizes.get("donated", 0)
    kept = {name: size for name, size in sizes.items() if name not in skipped}
    whole = sum(kept.values())
    found = [
        share
        for name, size in kept.items()
        for share in split(root.children[name].label, root.children[name], size)
    ]
    found.sort(key=lambda share: share[-1], reverse=True)
    return [share for share in found[:_LARGEST] if share[-1] > 0]
