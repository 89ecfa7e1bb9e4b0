"""Reads the arguments that every planning function takes: mesh, rules, options, or a plan.

Rules come under two names, ``rules`` and Penzai's ``axis_name_to_mesh_name``. What is certainly a
mistake is refused here, in one table.
"""

import dataclasses
import inspect
import reprlib
from typing import Any, Literal, get_args

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import MeshError, Problem, RuleTypeError
from penzai_shard.meshes import AnyMesh, auto_twin, mesh_text, same_devices
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.readers.reader import refusal
from penzai_shard.rules import AxisRules, OnIndivisible

OnUnnamed = Literal["error", "replicate", "infer"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What a caller asked for.

    Attributes:
        called: The function that was called, for messages.
        mesh: The mesh, with Auto axes.
        rules: The rules.
        on_indivisible: What to do with a length that does not divide.
        on_unnamed: What to do with an array without names.
        plan: A plan that was made before and is to be carried out.
        is_explicit: Whether the mesh was given with Explicit axes.
    """

    called: str
    mesh: AnyMesh
    rules: AxisRules
    on_indivisible: OnIndivisible = "error"
    on_unnamed: OnUnnamed = "error"
    plan: ShardingPlan | None = None
    is_explicit: bool = False


def read(
    called: str,
    mesh: Any,
    rules: Any = None,
    axis_name_to_mesh_name: Any = None,
    *,
    on_indivisible: Any = "error",
    on_unnamed: Any = "error",
    plan: Any = None,
) -> Request:
    """Reads the arguments of a function that plans, or that carries a plan out.

    Args:
        called: The name of that function.
        mesh: A mesh, or a plan in its place.
        rules: Rules in any form that ``AxisRules`` takes.
        axis_name_to_mesh_name: The same under Penzai's name.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: A plan in place of mesh, rules and options.

    Raises:
        RuleTypeError: Arguments contradict each other, or cannot be read.
        MeshError: A rule names a mesh axis that the mesh does not have, or the plan is one for
            another mesh.
    """
    if isinstance(mesh, ShardingPlan) and plan is None:
        mesh, plan = None, mesh
    _refuse_mistakes(called, mesh, rules, axis_name_to_mesh_name, plan)
    rules = axis_name_to_mesh_name if rules is None else rules
    _check_option(called, "on_indivisible", on_indivisible, get_args(OnIndivisible))
    _check_option(called, "on_unnamed", on_unnamed, get_args(OnUnnamed))
    if plan is None:
        is_explicit = auto_twin(mesh) is not mesh
        request = Request(
            called,
            auto_twin(mesh),
            AxisRules(rules),
            on_indivisible,
            on_unnamed,
            is_explicit=is_explicit,
        )
        request.rules.on(request.mesh.shape)
        return request
    if mesh is not None and not same_devices(mesh, plan.mesh):
        what = f"the plan is one for another mesh ({mesh_text(plan.mesh)}) than the one given"
        fix = "Leave the mesh out, or plan for it: make_plan(tree, mesh, rules)."
        raise MeshError(f"{called}:", [Problem("", what, fix)])
    return Request(called, plan.mesh, plan.rules, plan=plan)


def _refuse_mistakes(called: str, mesh: Any, rules: Any, penzais_rules: Any, plan: Any) -> None:
    given = penzais_rules if rules is None else rules
    name = getattr(given if callable(given) else mesh, "__name__", "")
    kind = type(mesh).__name__
    mistakes = (
        (
            rules is not None and penzais_rules is not None,
            "rules and axis_name_to_mesh_name are two names of one argument, and both are given",
            "Give one: rules=AxisRules(first) | second.",
        ),
        (
            isinstance(given, ShardingPlan),
            "a plan stands in the place of the rules",
            "Give it by name: plan=plan.",
        ),
        (
            isinstance(given, Mesh | AbstractMesh),
            "a mesh stands in the place of the rules",
            "Name both: mesh=mesh, rules=rules.",
        ),
        (
            plan is not None and not isinstance(plan, ShardingPlan),
            f"plan is a {type(plan).__name__} and no plan",
            "Make one: plan=make_plan(tree, mesh, rules).",
        ),
        (
            plan is not None and given is not None,
            "a plan is given, which has decided already, and rules are given too",
            "Leave the rules out, or plan by them: make_plan(tree, mesh, rules).",
        ),
        (
            inspect.isfunction(given),
            f"the rules are the function {name}, which was not called",
            f"Write {name}().",
        ),
        (
            inspect.ismethod(mesh),
            f"the mesh is the method {name}, which was not called",
            f"Write .{name}().",
        ),
        (
            mesh is None and plan is None,
            "a mesh is needed",
            "Write mesh=make_mesh({'data': 4, 'model': 2}).",
        ),
        (
            mesh is not None and not isinstance(mesh, Mesh | AbstractMesh),
            f"a mesh is needed, and {reprlib.repr(mesh)} is a {kind}",
            "Write mesh=make_mesh({'data': 4, 'model': 2}).",
        ),
    )
    for is_so, what, fix in mistakes:
        if is_so:
            raise RuleTypeError(f"{called}:", [Problem("", what, fix)])


def _check_option(called: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise RuleTypeError(
            f"{called}:", [Problem("", f"{name} is {value!r}", f"Write one of {words}.")]
        )


def check_tree(called: str, tree: Any) -> None:
    """Refuses what makes a tree of arrays and is none.

    Raises:
        RuleTypeError: It is a function, a class, or a module that holds no arrays.
    """
    if inspect.isroutine(tree) or inspect.isclass(tree):
        name = getattr(tree, "__name__", "build")
        what = f"the tree is {name} itself, which was not called"
        fix = f"Give the shapes that it makes: abstract_model({name}, ...)."
        raise RuleTypeError(f"{called}:", [Problem("", what, fix)])
    reason = refusal(tree)
    if reason is not None:
        raise RuleTypeError(f"{called}:", [Problem("", *reason)])
