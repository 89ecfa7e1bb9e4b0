"""Reads the arguments that every planning function takes: mesh, rules, options, or a plan.

Rules come under two names, ``rules`` and Penzai's ``axis_name_to_mesh_name``. What is certainly a
mistake is refused here, and nowhere else.
"""

import dataclasses
import inspect
import reprlib
from typing import Any, Literal, get_args

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import MeshError, Problem, RuleTypeError
from penzai_shard.meshes import AnyMesh, auto_twin, mesh_text, same_devices
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.readers.reader import find_refusal
from penzai_shard.rules import AxisRules, OnIndivisible, check_option

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
        naming: How the caller names an array without names; by default with ``name_axes``.
    """

    called: str
    mesh: AnyMesh
    rules: AxisRules
    on_indivisible: OnIndivisible = "error"
    on_unnamed: OnUnnamed = "error"
    plan: ShardingPlan | None = None
    is_explicit: bool = False
    naming: str = ""


def read(
    called: str,
    mesh: Any,
    rules: Any = None,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: Any = "error",
    on_unnamed: Any = "error",
    *,
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
    # The defaults of all that take a plan.
    has_options = (on_indivisible, on_unnamed) != ("error", "error")
    _refuse_mistakes(called, mesh, rules, axis_name_to_mesh_name, plan, has_options)
    rules = axis_name_to_mesh_name if rules is None else rules
    check_option(called, "on_indivisible", on_indivisible, get_args(OnIndivisible))
    check_option(called, "on_unnamed", on_unnamed, get_args(OnUnnamed))
    if plan is None:
        # Mesh axes that are not there are told before any array is looked at.
        twin, read_rules = auto_twin(mesh), AxisRules(rules)
        read_rules.on(twin.shape)
        return Request(
            called, twin, read_rules, on_indivisible, on_unnamed, is_explicit=twin is not mesh
        )
    if mesh is not None and not same_devices(mesh, plan.mesh):
        what = f"the plan is one for another mesh ({mesh_text(plan.mesh)}) than the one given"
        fix = "Leave the mesh out, or plan for it: make_plan(tree, mesh, rules)."
        raise MeshError(f"{called}:", [Problem("", what, fix)])
    # A plan of devices that are not there is one for devices that are.
    plan = plan if mesh is None else plan.on(auto_twin(mesh))
    return Request(called, plan.mesh, plan.rules, plan=plan)


def _refuse_mistakes(
    called: str, mesh: Any, rules: Any, penzais_rules: Any, plan: Any, has_options: bool
) -> None:
    given = penzais_rules if rules is None else rules
    name = getattr(given, "__name__", "")
    make_mesh = "Write mesh=make_mesh({'data': 4, 'model': 2})."

    # The first of these is told: what follows would mostly come of it.
    def refuse(is_so: bool, argument: str, what: str, fix: str) -> None:
        if is_so:
            raise RuleTypeError(f"{called}:", [Problem(argument, what, fix)])

    both = "rules and axis_name_to_mesh_name are two names of one argument, and both are given"
    are_two = rules is not None and penzais_rules is not None
    refuse(are_two, "rules", both, "Give one: rules=AxisRules(first) | second.")
    is_plan = isinstance(given, ShardingPlan)
    refuse(is_plan, "rules", "a plan stands in their place", "Write rules=plan.rules.")
    is_swapped = isinstance(given, Mesh | AbstractMesh)
    refuse(is_swapped, "rules", "a mesh stands in their place", "Write mesh=mesh, rules=rules.")
    fix = "Write plan=make_plan(tree, mesh, rules)."
    is_none = not isinstance(plan, ShardingPlan | None)
    refuse(is_none, "plan", f"{reprlib.repr(plan)} is no plan", fix)
    is_decided = plan is not None and (given is not None or has_options)
    what = "it has decided already, and rules or options are given too"
    refuse(is_decided, "plan", what, "Leave them out.")
    what = f"the function {name} was not called"
    is_preset = inspect.isfunction(given) and name.isidentifier()
    refuse(is_preset, "rules", what, f"Write {name}().")
    lacks_mesh = plan is None if mesh is None else not isinstance(mesh, Mesh | AbstractMesh)
    refuse(lacks_mesh, "mesh", f"a mesh is needed, not {reprlib.repr(mesh)}", make_mesh)


def check_tree(called: str, tree: Any) -> None:
    """Refuses functions and modules that are given in place of a tree of arrays.

    Raises:
        RuleTypeError: It is a function, a class, or a module that holds no arrays.
    """
    if inspect.isroutine(tree) or inspect.isclass(tree):
        name = getattr(tree, "__name__", "build")
        what = f"the tree is {name} itself, which was not called"
        fix = f"Give the shapes that it makes: abstract_model({name}, ...)."
        raise RuleTypeError(f"{called}:", [Problem("", what, fix)])
    reason = find_refusal(tree)
    if reason is not None:
        raise RuleTypeError(f"{called}:", [Problem("", *reason)])
