"""Writes one page about a layout: verdict, figures, plan, findings, memory, collectives, and why.

The page is one HTML file without scripts that loads nothing. What it shows are the reports of other
rooms; what could not be found out stands in its section in the words of the error.
"""

import html
import importlib.resources
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from penzai_shard.rules import OnIndivisible

_LARGEST = 3
# These sections are trees; what a row of another says in sentences needs a table.
_TREES = ("Plan", "Step", "Memory", "Collectives")
# What is said first of the step: the layers with most of a column.
_HEADINGS = {"arrays": "Most memory", "temporaries": "Most at the peak", "sent": "Most traffic"}
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
        path: The file; one that is there is replaced when the page is whole.
        on_indivisible: As for ``make_plan``.
        **kwargs: What the step is called with by keyword. If the model can be called with those
            that are named arrays, the findings are also about what flows through it.

    Returns:
        The file. The same input gives the same bytes.

    Raises:
        RuleTypeError: There is no mesh, no model or no step, or the path is a folder.
        MeshError: The step is on another mesh.
        OSError: The file cannot be written.
        ShardingError: As ``compile_step``.

    >>> import tempfile
    >>> import penzai_shard as pzs
    >>> from penzai import pz
    >>> mesh = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
    >>> model = {"up": pz.nx.ones({"embedding": 8, "neurons": 16})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(model, mesh, {"neurons": "model"}, path=f"{folder}/report.html")
    ...     page.read_text().count("<h2")
    6
    """
    arguments.read("report", mesh, {}, on_indivisible=on_indivisible)
    arguments.check_tree("report", model)
    # Before a step is compiled, which may take minutes.
    file = pathlib.Path(path)
    errors.check_arguments("report", {"path": (path, not file.is_dir(), "path='report.html'")})
    file.parent.mkdir(parents=True, exist_ok=True)

    options: Any = {"on_indivisible": on_indivisible, "on_unnamed": "replicate"}
    # What warnings say, the findings say.
    with warnings.catch_warnings(action="ignore", category=errors.ShardingWarning):
        plan = _attempt(lambda: _plan(model, mesh, rules, options), errors.ShardingError)
        findings = _find(model, mesh, rules, kwargs, options)
        sections = {"Plan": plan, "Findings": findings, **_read_step(step, mesh, args, kwargs)}
        title = f"{type(model).__name__} on mesh ({mesh_text(mesh)})"
        page = _write_page(title, sections)
    file.write_text(page, encoding="utf-8")
    return file


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
    titles = ("Step", "Memory", "Collectives", "Why")
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
    sections = {"Step": compiled, "Memory": compiled.memory, "Collectives": collectives}
    if isinstance(causes, WhyReport) and isinstance(collectives, CollectiveReport):
        because = causes.collectives()
        sections |= {"Because": because, "Rules": because.by_rule()}
    return {**sections, "Why": causes}


# The page


def _write_page(title: str, sections: _Sections) -> str:
    style = importlib.resources.files(__package__).joinpath("page.css").read_text("utf-8")
    largest, written, links, figures = _write_largest(sections["Step"]), "", "", ""
    for name, section in sections.items():
        content = _write_section(name, section.report())
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


def _write_section(name: str, report: Report) -> str:
    # Without an answer there are no rows.
    is_tree = name in _TREES and report.rows and report.columns[0].kind == "path"
    return write_tree(report.tree()) if is_tree else report._repr_html_()


def _write_largest(step: HasReport) -> str:
    """The layers of a step with most of each quantity, if it has a program."""
    columns = [column.name for column in step.report().columns]
    largest = ""
    for column in _HEADINGS if {*_HEADINGS} <= {*columns} else ():
        rows = step.largest(column, _LARGEST).to_data()["rows"][:_LARGEST]
        largest += f"<div><h3>{_HEADINGS[column]}</h3>"
        for row in rows:
            size = bytes_text(row[column] or 0)
            largest += f"<p><b>{_escape(row['layer'])}</b><span>{size}</span></p>"
        largest += "</div>"
    return largest
