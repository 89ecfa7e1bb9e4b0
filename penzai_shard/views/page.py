"""Writes one page about a layout: verdict, figures, plan, memory, collectives, findings, and why.

The page is one HTML file without scripts that loads nothing. What it shows are the reports of other
rooms; what could not be found out stands in its section in the words of the error.
"""

import dataclasses
import html
import importlib.resources
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penzai_shard.causes.collectives import explain_collectives
from penzai_shard.causes.why import WhyReport, why
from penzai_shard.errors import (
    CompilationError,
    MeshError,
    Problem,
    ProgramError,
    PropagationError,
    RuleTypeError,
    ShardingError,
    ShardingWarning,
)
from penzai_shard.findings.lint import lint
from penzai_shard.inspection.collectives import CollectiveReport
from penzai_shard.inspection.compile_ahead import AheadReport
from penzai_shard.inspection.compiling import compile_step
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

# Trees of more rows are not written, so that a page stays below 2 MB; a table ends by itself.
_MOST_TREE_ROWS = 1500
_LARGEST = 3
_TITLES = ("Plan", "Memory", "Collectives", "Because", "Rules", "Findings", "Why")
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
        path: The file; one that is there is replaced.
        on_indivisible: As for ``make_plan``.
        **kwargs: What the step is called with by keyword.

    Returns:
        The file. The same input gives the same bytes.

    Raises:
        RuleTypeError: There is no mesh, no model or no step; or the path is a folder.
        MeshError: The step is on another mesh.
        ShardingError: As ``compile_step``.

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
    file, called = pathlib.Path(path), "report:"
    if file.is_dir():
        fix = f"Write path={str(file / 'report.html')!r}."
        raise RuleTypeError(called, [Problem("path", "it is a folder", fix)])
    if step is None and (args or kwargs):
        fix = "Write report(model, mesh, rules, step, ...)."
        raise RuleTypeError(called, [Problem("", "there are arguments and no step", fix)])

    options: Any = {"on_indivisible": on_indivisible, "on_unnamed": "replicate"}
    with warnings.catch_warnings():
        # The findings say the same.
        warnings.simplefilter("ignore", ShardingWarning)
        plan = _attempt(lambda: _plan(model, mesh, rules, options), ShardingError)
        compiled = _read_step(step, mesh, args, kwargs)
        sections = {"Plan": plan, **compiled}
        sections["Findings"] = lint(model, mesh, rules, **options)
    title = f"{type(model).__name__} on mesh ({mesh_text(mesh)})"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_write_page(title, sections), encoding="utf-8")
    return file


def _plan(model: Any, mesh: AnyMesh, rules: Any, options: Any) -> ShardingPlan:
    if isinstance(rules, Layout):
        return rules.plan(model, mesh, **options)
    return make_plan(model, mesh, rules, **options)


def _attempt(make: Callable[[], HasReport], error_type: type[ShardingError]) -> HasReport:
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
    if step is None:
        verdict = "no step is given: report(model, mesh, rules, step, ...)"
        return dict.fromkeys(titles, Report("", verdict))
    compiled: Any = step
    if not isinstance(step, AheadReport):
        compiled = _attempt(lambda: compile_step(step, *args, **kwargs), CompilationError)
    if isinstance(compiled, Report):
        return dict.fromkeys(titles, compiled)
    own = compiled.memory.step.mesh
    if own is None or axis_sizes(own) != axis_sizes(mesh):
        where = "on no mesh" if own is None else f"on mesh ({mesh_text(own)})"
        what = f"the arrays of the step are {where}, and the page is of mesh ({mesh_text(mesh)})"
        raise MeshError("report:", [Problem("", what, "Give the mesh of the step.")])
    program = compiled.program if isinstance(compiled, AheadReport) else compiled
    if program is None:
        unknown = Report("", "the compiler gives no program of a step that is too large")
        return {**dict.fromkeys(titles, unknown), "Memory": compiled.memory}
    collectives = _attempt(lambda: program.collectives, ProgramError)
    causes = _attempt(lambda: why(program), PropagationError)
    sections = dict(zip(titles, (compiled.memory, collectives, causes), strict=True))
    if isinstance(causes, WhyReport) and isinstance(collectives, CollectiveReport):
        because = explain_collectives(causes.words, program)
        sections |= {"Because": because, "Rules": because.by_rule()}
    return sections


# The page


def _write_page(title: str, sections: _Sections) -> str:
    style = importlib.resources.files(__package__).joinpath("page.css").read_text("utf-8")
    largest, written = "", ""
    titles = [name for name in _TITLES if name in sections]
    for name in titles:
        ranking, content = _write_section(name, sections[name].report())
        largest += ranking
        written += f'<h2 id="{name.lower()}">{name}</h2>{content}'
    state, verdict = _judge(sections)
    figures = ""
    for name, (section, text, remark, own) in _find_figures(sections).items():
        text, remark = _escape(text), _escape(remark)
        figures += f'<a href="#{section.lower()}">{name}<b class="{own}">{text}</b>{remark}</a>'
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in titles)
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


def _judge(sections: _Sections) -> tuple[str, str]:
    """Whether all is well, as far as that is known, and a sentence that says so."""
    plan, memory, findings = (sections[name] for name in ("Plan", "Memory", "Findings"))
    state = ""
    if not isinstance(plan, ShardingPlan):
        state, verdict = "bad", "There is no valid layout."
    elif isinstance(memory, MemoryReport):
        state, verdict = _STATES[memory.fits], f"The step {memory.report().verdict}."
    else:
        held, total = bytes_text(plan.bytes_per_device), bytes_text(plan.total_bytes)
        verdict = f"Each device holds {held} of {total}."
    if count := len(findings.report().rows):
        verdict += f" There {'is 1 finding' if count == 1 else f'are {count} findings'}."
    return "" if state == "good" and count else state, verdict


def _find_figures(sections: _Sections) -> dict[str, tuple[str, str, str, str]]:
    """For each of the figures that are seen first its section, text, remark and state."""
    plan, memory, sent = (sections[name] for name in ("Plan", "Memory", "Collectives"))
    figures = {
        "Memory per device": ("Memory", "-", "not known", ""),
        "Sent per device and step": ("Collectives", "-", "not known", ""),
        "Stored per device": ("Plan", "-", "not known", ""),
    }
    if isinstance(memory, MemoryReport):
        remark = "of an unknown limit"
        if memory.limit is not None:
            remark = f"{memory.total / memory.limit:.0%} of {bytes_text(memory.limit)}"
        found = "Memory", bytes_text(memory.total), remark, _STATES[memory.fits]
        figures["Memory per device"] = found
    if isinstance(sent, CollectiveReport):
        remark = f"in {sent.total.count:,} collectives"
        found = "Collectives", bytes_text(sent.wire_bytes), remark, ""
        figures["Sent per device and step"] = found
    if isinstance(plan, ShardingPlan):
        whole, replicated = bytes_text(plan.total_bytes), bytes_text(plan.replicated_bytes)
        remark = f"of {whole}; replicated {replicated}"
        figures["Stored per device"] = "Plan", bytes_text(plan.bytes_per_device), remark, ""
    findings = sections["Findings"].report()
    kinds = ", ".join(dict.fromkeys(row[1] for row in findings.rows)) or "nothing found"
    state = "bad" if findings.rows else "good"
    return figures | {"Findings": ("Findings", f"{len(findings.rows):,}", kinds, state)}


def _write_section(name: str, report: Report) -> tuple[str, str]:
    """What is largest in a report, for the head of the page; and the report."""
    is_nested = name in ("Plan", *_RANKED) and report.rows and report.columns[0].kind == "path"
    if not is_nested or len(report.fold().rows) > _MOST_TREE_ROWS:
        return "", report._repr_html_()
    tree, ranking = report.tree(), ""
    if name in _RANKED:
        heading, columns = _RANKED[name]
        whole = tree.root.sums.get(columns[0]) or math.inf
        for number, (path, node, size) in enumerate(_find_largest(tree.root, columns)):
            node.anchor = f"{name.lower()}-{number}"
            link = f'<a href="#{node.anchor}">{_escape(path.rstrip("/."))}</a>'
            ranking += f"<p>{link}<span>{bytes_text(size)}, {size / whole:.0%}</span></p>"
            ranking += f'<div class="bar" style="width: {min(size / whole, 1):.1%}"></div>'
        ranking = f"<div><h3>{heading}</h3>{ranking or 'Nothing.'}</div>"
    table = dataclasses.replace(report, verdict="", notes=())._repr_html_()
    details = f"<details><summary>The same as a table</summary>{table}</details>"
    return ranking, write_tree(tree) + details


def _find_largest(root: Node, columns: Sequence[str]) -> list[tuple[str, Node, float]]:
    """The nodes with most of some columns. One that has more than half of it is looked into."""

    def read(path: str, node: Node) -> list[tuple[str, Node, float]]:
        nodes = [(path + child.label, child) for child in node.children.values()]
        return [(path, one, sum(one.sums.get(c, 0) for c in columns)) for path, one in nodes]

    skipped = _NOT_RANKED if columns[-1] in root.sums else _NOT_RANKED - {"temporaries"}
    # Outputs take the memory of donated arrays before other memory.
    donated = sum(size for path, _, size in read("", root) if path == "donated")
    found = [
        (path, node, size + donated * (path == "outputs"))
        for path, node, size in read("", root)
        if path not in skipped
    ]
    whole, opened = sum(size for *_, size in found), set()
    while found:
        found.sort(key=lambda item: item[-1], reverse=True)
        path, node, size = found[0]
        # Several rows of one path are below it, and have no path of their own.
        is_split = len(node.children) > 1 and not any(key[0] == "/" for key in node.children)
        if path in opened or not is_split or size <= whole / 2:
            break
        below = read(path, node)
        itself = f"{path.rstrip('/.')} itself"
        opened.add(itself)
        found[:1] = [*below, (itself, node, size - sum(size for *_, size in below))]
    return [item for item in found[:_LARGEST] if item[-1] > 0]
