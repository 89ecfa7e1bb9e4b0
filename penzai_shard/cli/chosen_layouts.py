"""Mesh, rules and layout on the command line."""

import argparse
import dataclasses
import os
import re
from typing import Any, get_args

from jax.sharding import AbstractMesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.cli.mesh_arguments import mesh_shape
from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.layouts import Layout
from penzai_shard.layouts.layout_file import PRESETS, LayoutFile
from penzai_shard.layouts.rule_expressions import read_rules_expression
from penzai_shard.meshes import make_mesh, mesh_text
from penzai_shard.rule_kinds import OnIndivisible

_PAIR = re.compile(r"\s*(?P<logical>[\w.-]+)\s*=\s*(?P<mesh>[\w.+-]*)\s*")
_RULES_EXAMPLE = (
    "Write embedding=data,neurons=model, or data_parallel+tensor_parallel, or the path of a file "
    "such as penzai-shard rules --example prints."
)


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the mesh, the rules and the layout."""
    parser.add_argument(
        "--mesh",
        metavar="data=8,model=4",
        help="sizes of the mesh axes, unless the file of rules says them; no devices are needed",
    )
    parser.add_argument(
        "--rules",
        metavar="FILE_OR_PAIRS",
        help="a TOML file (penzai-shard rules --example prints one); or pairs of a logical axis "
        "and a mesh axis, embedding=data,neurons=model,heads=none,batch=data+model; or rules as "
        "code has them, 'data_parallel() | fully_sharded(min_size=1024)'",
    )
    parser.add_argument(
        "--layout",
        metavar="PRESET",
        help=f"in place of rules, one of {', '.join(PRESETS)}, with options if it takes some: "
        "\"two_dimensional(vocabulary='model')\". By default, of these the one for the mesh axes",
    )
    parser.add_argument(
        "--on-indivisible",
        choices=get_args(OnIndivisible),
        help="what becomes of lengths that do not divide: an error; whole on every device "
        "(replicate); stored padded (pad). By default what the file of rules says, or an error",
    )


@dataclasses.dataclass(frozen=True)
class ChosenLayout:
    """A layout that was asked for, or is chosen by default.

    Attributes:
        text: What was asked for, or would have to be.
        layout: The layout.
        mesh: The mesh, without devices.
        notes: What was decided, in sentences.
        microbatches: In how many parts a batch is computed, if the file of rules says it.
        says_step: Whether the file of rules says the mesh, as those of ``choose_layout`` do, and
            with it all of the step: where it is silent of rematerialisation, all is kept.
        on_indivisible: What becomes of lengths that do not divide, as it was asked for, or as the
            file of rules says.
    """

    text: str
    layout: Layout
    mesh: AbstractMesh
    notes: tuple[str, ...] = ()
    microbatches: int | None = None
    says_step: bool = False
    on_indivisible: OnIndivisible = "error"

    def line(self) -> str:
        """What it is, in a line."""
        text = self.text
        if self.on_indivisible != "error":
            text += f" --on-indivisible {self.on_indivisible}"
        return f"{text} ({'; '.join(self.notes)})" if self.notes else text

    def said(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "layout": self.text,
            "layout_notes": list(self.notes),
            "mesh": dict(self.mesh.shape),
            "on_indivisible": self.on_indivisible,
        }


def chosen_layout(options: argparse.Namespace, model: Any) -> ChosenLayout:
    """Reads mesh, rules and layout.

    Args:
        options: What was parsed.
        model: The model, of which the layout by default depends.

    Raises:
        ShardingError: They cannot be read, or do not belong together.
    """
    chosen = _chosen(options, model)
    if options.on_indivisible is None:
        return chosen
    return dataclasses.replace(chosen, on_indivisible=options.on_indivisible)


def _chosen(options: argparse.Namespace, model: Any) -> ChosenLayout:
    """Mesh and layout."""
    if options.rules is not None and options.layout is not None:
        raise RuleTypeError(
            "--rules and --layout are two ways to say the same. Leave one of them out."
        )
    said = LayoutFile(None)
    if options.rules is not None and _is_file(options.rules):
        said = Layout.read_toml(options.rules)
    if options.mesh is None and said.mesh_shape is None:
        raise MeshError("the mesh is needed too: --mesh data=8,model=4.")
    asked = None if options.mesh is None else mesh_shape(options.mesh)
    mesh = make_mesh(asked or said.mesh_shape, abstract=True)
    if options.layout is not None:
        layout = Layout.of_expression(options.layout)
        return ChosenLayout(f"--layout {_quoted(options.layout)}", layout, mesh)
    if options.rules is None:
        return _by_default(model, mesh, options.on_indivisible or "error")
    notes = []
    if said.mesh_shape is not None and list(mesh.shape.items()) != list(said.mesh_shape.items()):
        notes.append(f"which is for mesh ({mesh_text(said.mesh_shape)})")
    return ChosenLayout(
        f"--rules {_quoted(options.rules)}",
        said.layout or read_rules(options.rules),
        mesh,
        tuple(notes),
        said.microbatches,
        said.mesh_shape is not None,
        said.on_indivisible or "error",
    )


def _is_file(text: str) -> bool:
    return os.path.isfile(text) or text.endswith(".toml") or os.sep in text


def read_rules(text: str) -> Layout:
    """Reads rules as they stand on the command line.

    Args:
        text: Pairs, or an expression.

    Raises:
        RuleTypeError: It is neither.

    >>> read_rules("embedding=data,neurons=model,projection=none,batch=data+model").parameters
    AxisRules({'embedding': 'data', 'neurons': 'model', 'projection': None, 'batch': ('data', ...
    """
    if not text.strip():
        raise RuleTypeError(f"--rules is empty. {_RULES_EXAMPLE}")
    if "=" in text and "(" not in text:
        return Layout.of_rules(AxisRules([_pair(part, text) for part in text.split(",")]))
    if text.strip() in PRESETS and text.strip() not in (
        "data_parallel",
        "fully_sharded",
        "tensor_parallel",
    ):
        raise RuleTypeError(f"{text} is a layout, with several tables of rules: --layout {text}.")
    return Layout.of_rules(read_rules_expression(text))


def _pair(part: str, text: str) -> tuple[str, Any]:
    match = _PAIR.fullmatch(part)
    if match is None or not match["mesh"]:
        raise RuleTypeError(f"cannot read {part!r} in rules {text!r}. {_RULES_EXAMPLE}")
    names = tuple(match["mesh"].split("+"))
    if names == ("none",):
        return match["logical"], None
    return match["logical"], names if len(names) > 1 else names[0]


def _by_default(model: Any, mesh: AbstractMesh, on_indivisible: OnIndivisible) -> ChosenLayout:
    """The layout of the literature for mesh axes of the usual names."""
    axes = set(mesh.axis_names)
    if axes == {"data", "model"}:
        preset = "two_dimensional"
    elif axes == {"data"}:
        preset = "fully_sharded"
    elif axes == {"model"}:
        preset = "tensor_parallel"
    elif axes == {"replica", "data"}:
        preset = "hybrid"
    else:
        first = mesh.axis_names[0]
        raise MeshError(
            f"no rules are given, and what they are by default is known of the mesh axes data and "
            f"model, one or both, and replica and data, not of {', '.join(mesh.axis_names)}. Give "
            f"other names, or say what goes where: --rules batch={first},embedding={first}, or "
            f"--layout \"fully_sharded('{first}')\"."
        )
    notes = ["no rules are given; these are the ones for such mesh axes"]
    options: dict[str, Any] = {"data": ()} if axes == {"model"} else {}
    options |= {"vocabulary": "model"} if "model" in axes else {}
    unfit: list[str] = []
    for names, change in (
        ({}, {}),
        ({"heads": None}, {}),
        ({}, {"vocabulary": None}),
        ({"heads": None}, {"vocabulary": None}),
    ):
        tried = {**options, **change, **({"names": names} if names else {})}
        tried = {name: value for name, value in tried.items() if value is not None}
        layout = getattr(Layout, preset)(**tried)
        try:
            layout.for_model(model, mesh, on_indivisible=on_indivisible)
        except PlanError as error:
            unfit = unfit or [f"otherwise {each}" for each in error.problems]
            continue
        said = ", ".join(f"{name}={value!r}" for name, value in tried.items())
        text = f'--layout "{preset}({said})"'
        return ChosenLayout(text, layout, mesh, (*notes, *unfit))
    layout = getattr(Layout, preset)(**options)
    return ChosenLayout(f"--layout {preset}", layout, mesh, tuple(notes))


def for_shell(problem: str) -> str:
    """A problem whose fix is for code, with one for the command line.

    >>> for_shell('Or store it padded: on_indivisible="pad".')
    'Or store it padded: --on-indivisible pad.'
    >>> for_shell("leave it whole: names={'neurons': None}")
    'leave it whole: --layout "two_dimensional(names={\\'neurons\\': None})"'
    """
    problem = problem.replace('pass on_unnamed="replicate"', "pass --on-unnamed replicate")
    return re.sub(
        r"leave it whole: (names=\{'\w+': None\})",
        r'leave it whole: --layout "two_dimensional(\1)"',
        problem.replace('on_indivisible="pad"', "--on-indivisible pad"),
    )


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w./=,+-]+", text) else f'"{text}"'
