"""One page for everything: a file that opens from disk, to be sent to a colleague."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from penzai_shard.errors import MeshError, PlanError, ProgramError, PropagationError, RuleTypeError
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.program_view import CompiledProgram, compile_step
from penzai_shard.inspection.sharding_causes import WhyReport, why
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.layouts import Layout
from penzai_shard.linting import lint
from penzai_shard.meshes import AnyMesh, mesh_text, refuse_other_than_mesh
from penzai_shard.model_variables import is_variable, variable_name
from penzai_shard.planning import ShardingPlan, make_plan
from penzai_shard.rule_kinds import OnIndivisible
from penzai_shard.surgery.tree_nodes import is_layer
from penzai_shard.training import TrainState
from penzai_shard.tree_arguments import refuse_builder
from penzai_shard.views.page_content import Missing, PageContent
from penzai_shard.views.page_html import page_html
from penzai_shard.whole_files import refuse_unwritable, write_whole

_NO_STEP = Missing(
    "No step is given, and what one needs and moves is in its program: "
    "report(model, mesh, rules, step, ...)."
)


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
    """Writes one page about a layout: plan, memory, collectives, findings, and why.

    The page is a single HTML file without scripts, which opens from disk and loads nothing. It
    begins with the verdict, and with the layers that hold and move most; each report unfolds below,
    layer by layer, equal blocks as one. The step is compiled once, and is not run.

    Args:
        model: A model or a ``TrainState``, concrete or abstract.
        mesh: The mesh, concrete or abstract.
        rules: How the model is laid out: what ``make_plan`` takes, or a ``Layout``. Arrays without
            names are shown replicated.
        step: As for ``compile_step``, which may have compiled it already. Without one the page
            shows what plan and rules say alone.
        *args: What the step is called with, concrete or abstract.
        path: The file to write, in the place of one that is there; its folder is made if there is
            none. It is the page's, so an input of the step of that name is given by way of
            ``compile_step(step, ..., path=...)``.
        on_indivisible: As for ``make_plan`` and ``lint``; the page's as well.
        **kwargs: What the step is called with by keyword. Without a step, or with one that is
            compiled, ``batch=`` is what the model is called with, as for ``lint``, so that what
            flows through it is looked at too. If the step is a layer that has the model's
            parameters, it is what that is called with.

    Returns:
        The file. The same input gives the same bytes.

    Raises:
        MeshError: The step is on another mesh; or a rule names a mesh axis that there is not.
        RuleTypeError: It is not a step, or these are not its arguments; or the path is a folder.

    >>> import jax, tempfile
    >>> from penzai import pz
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> model = {"up": pz.nx.ones({"embedding": 8, "neurons": 16})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(model, mesh, {"neurons": "model"}, path=f"{folder}/report.html")
    ...     page.read_text().count("<section")
    6
    """
    refuse_other_than_mesh(mesh, "report(model, mesh, rules, step, ...)", (model, rules))
    refuse_builder("report", model)
    _refuse_path_as_step(step)
    refuse_unwritable(path, "path=", "report.html", "page")
    batch, kwargs = _batch_of(model, step, args, kwargs)
    if step is None and (args or kwargs):
        raise RuleTypeError(
            f"no step is given, and {', '.join(kwargs) or 'its arguments'} would be what it is "
            "called with. Give the step before them: report(model, mesh, rules, step, ...)."
        )
    plan = plan_for_page(model, mesh, rules, on_indivisible)
    program = None if step is None else compile_step(step, *args, **kwargs)
    if program is not None:
        _refuse_other_mesh(program, mesh)
    content = PageContent(
        title=title_of(model),
        mesh=mesh_text(mesh),
        plan=plan,
        memory=_NO_STEP if program is None else MemoryReport.of(program),
        collectives=_NO_STEP if program is None else _collectives(program),
        lint=lint(
            model,
            mesh,
            rules,
            on_indivisible=on_indivisible,
            on_unnamed="replicate",
            batch=batch,
        ),
        why=_NO_STEP if program is None else why_for_page(program),
    )
    return write_page(content, path)


def _batch_of(
    model: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What the model is called with, None if it is not known; and what the step is by keyword.

    A step may have an input of its own that is called batch, and need not call the model with it.
    """
    if step is None or isinstance(step, StepProgram):
        return kwargs.get("batch"), {name: kwargs[name] for name in kwargs if name != "batch"}
    model = model.model if isinstance(model, TrainState) else model
    is_model = is_layer(step) and _variables(step) == _variables(model) != frozenset()
    return ((*args, kwargs) if is_model else None), kwargs


def _variables(tree: Any) -> frozenset[str]:
    """The names of the variables of a model, which stay whatever is put around its layers."""
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)
    return frozenset(variable_name(leaf) for leaf in leaves if is_variable(leaf)) - {""}


def plan_for_page(
    model: Any, mesh: AnyMesh, rules: Any, on_indivisible: OnIndivisible = "error"
) -> ShardingPlan | Missing:
    """The plan of a model; or, in the words of the error, why there is none."""
    # What the linter has findings about; rules that cannot be read are a mistake in the call.
    found = (MeshError, PlanError, *([RuleTypeError] if isinstance(rules, Layout) else []))
    try:
        if isinstance(rules, Layout):
            return rules.plan(model, mesh, on_indivisible=on_indivisible, on_unnamed="replicate")
        return make_plan(model, mesh, rules, on_indivisible=on_indivisible, on_unnamed="replicate")
    except found as error:
        headline, *problems = str(error).splitlines()
        return Missing(headline, tuple(problem.strip() for problem in problems))


def title_of(model: Any) -> str:
    """What a page about a model is called."""
    if isinstance(model, TrainState):
        model = model.model
    return type(model).__name__


def write_page(content: PageContent, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes a page to a file, whole or not at all."""
    return write_whole(path, page_html(content))


def _collectives(program: CompiledProgram) -> CollectiveReport | Missing:
    try:
        return CollectiveReport.of(program)
    except ProgramError as error:
        return Missing(str(error))


def why_for_page(program: CompiledProgram) -> WhyReport | Missing:
    """Where the layouts in a program come from; or why that cannot be said here."""
    try:
        return why(program.step)
    except PropagationError as error:
        return Missing(str(error))


def _refuse_path_as_step(step: Any) -> None:
    if isinstance(step, str | os.PathLike):
        raise RuleTypeError(
            f"the file is given in the place of the step. Name it: path={os.fspath(step)!r}."
        )


def _refuse_other_mesh(program: CompiledProgram, mesh: AnyMesh) -> None:
    of_step: Mapping[str, int] = {} if program.step.mesh is None else program.step.mesh.shape
    if dict(of_step) != dict(mesh.shape):
        where = f"on mesh ({mesh_text(of_step)})" if of_step else "not on a mesh"
        raise MeshError(
            f"the arrays of the step are {where}, and the page is of mesh ({mesh_text(mesh)}). "
            "Give the mesh of the step, or arrays that are on this one."
        )
