"""Layouts as TOML files: what ``Layout.from_toml`` reads, and ``Layout.to_toml`` writes.

The format is what ``example_file`` explains. Reading is strict: what is not known is an error, with
the key that was probably meant.
"""

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from typing import Any, Self, TypeGuard, get_args

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.layouts.presets import LayoutPresets
from penzai_shard.layouts.rule_expressions import read_call, read_rules_expression
from penzai_shard.rule_kinds import (
    IdentityRule,
    LargestDimensionRule,
    NameRule,
    OnIndivisible,
    Rule,
    nearest_name,
)

TABLES = ("parameters", "compute", "optimizer", "between_blocks")
"""The tables of a layout."""
_OPTIONS: dict[str, type] = {"rematerialise": str, "reshard_after_forward": bool, "manual": bool}
_OF_STEP = ("mesh", "microbatches", "on_indivisible")
_KEYS = ("layout", *_OF_STEP, *TABLES, *_OPTIONS, "blocks", "names")
_PRESET_EXAMPLE = "Write for instance two_dimensional(vocabulary='model')."


PRESETS = tuple(
    name
    for name, value in vars(LayoutPresets).items()
    if isinstance(value, classmethod) and not name.startswith("_")
)
"""The names of the presets of ``Layout``."""


@dataclasses.dataclass(frozen=True)
class LayoutFile:
    """What a file says: a layout, and perhaps of which step.

    Attributes:
        layout: The layout, a ``Layout``.
        mesh_shape: Name and size of each mesh axis; None if the file does not say.
        microbatches: In how many parts a batch is computed; None if the file does not say.
        on_indivisible: What the layout is to be applied with, as ``Layout.build`` takes it; None if
            the file does not say.
    """

    layout: Any
    mesh_shape: dict[str, int] | None = None
    microbatches: int | None = None
    on_indivisible: OnIndivisible | None = None


class LayoutFiles:
    """How a ``Layout`` is read from text, and written: what it inherits."""

    @classmethod
    def of_rules(cls, rules: Any) -> Self:
        """The layout that one table of rules, for parameters and for activations, stands for.

        Activations have the batch's axis. A rule for another axis that takes a mesh axis of the
        batch, such as ``embedding -> data`` in fully sharded training, says how parameters are
        stored, and is left out where layers compute.

        Args:
            rules: Rules in any form that ``AxisRules`` reads.

        >>> from penzai_shard import Layout
        >>> Layout.of_rules({"batch": "data", "embedding": "data", "neurons": "model"}).compute
        AxisRules({'batch': 'data', 'neurons': 'model'})
        """
        parameters = AxisRules.of(rules)
        names = parameters.name_rules
        taken = {name for rule in names if rule.logical_axis == "batch" for name in rule.mesh_axes}
        compute = AxisRules.from_rules(
            rule
            for rule in parameters.rules
            if isinstance(rule, IdentityRule)
            or (
                isinstance(rule, NameRule)
                and (rule.logical_axis == "batch" or not taken & set(rule.mesh_axes))
            )
        )
        return _made(cls, parameters=parameters, compute=compute)

    @classmethod
    def of_expression(cls, text: str) -> Self:
        """A preset with its options, from a text as code has it.

        Args:
            text: For instance ``"two_dimensional(vocabulary='model')"``; brackets without anything
                in them may be left out. Options are literals; no code is run.

        Raises:
            RuleTypeError: The text says something else.

        >>> from penzai_shard import Layout
        >>> Layout.of_expression("zero1(min_size=8)").optimizer
        fully_sharded('data', min_size=8)
        """
        presets = {name: getattr(cls, name) for name in PRESETS}
        layout: Self = read_call(text, text, presets, _PRESET_EXAMPLE)
        return layout

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a layout from a TOML file; ``penzai-shard rules --example`` prints one, explained.

        Args:
            path: The file.

        Returns:
            The layout. A file with parameters' rules alone is read as ``of_rules`` says. What it
            says beyond the layout, ``mesh``, ``microbatches`` and ``on_indivisible``, is in
        ``read_toml``.

        Raises:
            RuleTypeError: The file cannot be read; with one line per key that is wrong.
        """
        layout: Self = cls.read_toml(path).layout
        return layout

    @classmethod
    def read_toml(cls, path: str | os.PathLike[str]) -> LayoutFile:
        """All that a TOML file says: mesh, microbatches and padding of a step included.

        Args:
            path: The file.

        Raises:
            RuleTypeError: As ``from_toml`` does.
        """
        if "\n" in os.fspath(path):
            raise RuleTypeError(
                "this is the text of a table of rules, and the path of its file is needed. Write "
                "it to one: pathlib.Path('rules.toml').write_text(text)."
            )
        try:
            with open(path, "rb") as file:
                found = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise RuleTypeError(f"{os.fspath(path)}: is not TOML: {error}.") from error
        except UnicodeDecodeError as error:
            raise RuleTypeError(f"{os.fspath(path)}: is not a text in UTF-8.") from error
        except OSError as error:
            raise RuleTypeError(
                f"{os.fspath(path)}: cannot be read: {error.strerror}. penzai-shard rules "
                "--example prints such a file."
            ) from error
        return _read(cls, found, os.fspath(path))

    def to_toml(
        self,
        mesh_shape: Mapping[str, int] | None = None,
        microbatches: int | None = None,
        on_indivisible: OnIndivisible = "error",
    ) -> str:
        """The layout as the text of a file, which ``from_toml`` reads.

        Args:
            mesh_shape: What to say of the mesh too: the size of each mesh axis by name.
            microbatches: And of how many parts a batch is computed in.
            on_indivisible: And what it is to be applied with; ``"error"`` is left out.

        Raises:
            RuleTypeError: It has something that a text cannot say, such as layers in ``blocks``.

        >>> from penzai_shard import Layout
        >>> print(Layout.fully_sharded(min_size=8).to_toml())
        parameters = [
          "fully_sharded('data', min_size=8)",
        ]
        compute = [
          "data_parallel('data', batch_axis='batch')",
        ]
        """
        of_step: dict[str, int | str | None] = {"microbatches": microbatches}
        if on_indivisible != "error":
            of_step["on_indivisible"] = on_indivisible
        return _written(self, mesh_shape, of_step)


def _made(cls: Any, **arguments: Any) -> Any:
    return cls(**arguments)


def _read(cls: Any, found: Mapping[str, Any], source: str) -> LayoutFile:
    """What a file says; ``source`` is what messages call it."""
    problems = [_unknown(key) for key in found if key not in _KEYS]
    tables: dict[str, AxisRules] = {}
    for name in TABLES:
        if name in found:
            try:
                tables[name] = _read_table(found[name], name)
            except RuleTypeError as error:
                problems += [f"{name}: {each}" for each in error.problems or (str(error),)]
    options: dict[str, Any] = {name: found[name] for name in (*_OPTIONS, "names") if name in found}
    for name, value in options.items():
        wanted = _OPTIONS.get(name, dict)
        if not isinstance(value, wanted):
            kind = {str: "a text", bool: "true or false", dict: "a table"}[wanted]
            problems.append(f"{name}: is {value!r}, and has to be {kind}.")
    if isinstance(names := options.get("names"), dict):
        options["names"] = {role: _name(own) for role, own in names.items()}
    problems += _problems_of_step(found)
    if "blocks" in found:
        options["blocks"] = ()
    if "layout" not in found and "parameters" not in found:
        problems.append(
            'it says neither layout nor parameters. Write layout = "fully_sharded", or a table '
            "[parameters]."
        )
    raise_all(RuleTypeError, f"{source} cannot be read:", problems)
    try:
        if "layout" in found:
            layout = cls.of_expression(str(found["layout"]))
        else:
            layout = cls.of_rules(tables["parameters"])
        layout = dataclasses.replace(layout, **tables, **options)
        return LayoutFile(layout, *map(found.get, _OF_STEP))
    except RuleTypeError as error:
        raise RuleTypeError(f"{source}: {error}") from error


def _problems_of_step(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with what a file says of the step, and of blocks."""
    problems = []
    mesh = found.get("mesh", {"data": 1})
    if not isinstance(mesh, dict) or not mesh or not all(map(_is_count, mesh.values())):
        problems.append(
            f"mesh: is {mesh!r}, and has to say the size of each mesh axis: "
            "mesh = { data = 8, model = 4 }."
        )
    if not _is_count(found.get("microbatches", 1)):
        problems.append(f"microbatches: is {found['microbatches']!r}, and has to be at least 1.")
    if (unfit := found.get("on_indivisible", "error")) not in get_args(OnIndivisible):
        known = ", ".join(map(_value, get_args(OnIndivisible)))
        problems.append(f"on_indivisible: is {unfit!r}, and has to be one of {known}.")
    if found.get("blocks", []) != []:
        problems.append(
            f"blocks: is {found['blocks']!r}, and a file can say [] alone, which leaves "
            "activations to the compiler. Layers are named in Python: Layout(blocks=...)."
        )
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _written(
    layout: Any, mesh_shape: Mapping[str, int] | None, of_step: Mapping[str, int | str | None]
) -> str:
    problems: list[str] = []
    lines: list[str] = []
    if mesh_shape is not None:
        lines.append(table_line("mesh", mesh_shape))
    lines += [f"{name} = {_value(said)}" for name, said in of_step.items() if said is not None]
    if layout.blocks == ():
        lines.append("blocks = []")
    elif layout.blocks is not None:
        problems.append("blocks: layers cannot be written to a file. Leave it out.")
    for name in _OPTIONS:
        if (value := getattr(layout, name)) not in (None, False):
            lines.append(f"{name} = {_value(value)}")
    in_tables: list[str] = []
    for name in TABLES:
        rules = getattr(layout, name)
        if rules is None:
            continue
        problems += _unwritable(name, rules)
        if _is_table(rules.rules):
            in_tables += ["", f"[{name}]"]
            in_tables += [f"{_key(rule.logical_axis)} = {_mesh_axes(rule)}" for rule in rules.rules]
        else:
            lines += [f"{name} = [", *(f"  {item}," for item in _items(rules.rules)), "]"]
    if layout.names:
        in_tables += ["", "[names]"]
        in_tables += [f"{_key(role)} = {_value(name)}" for role, name in layout.names.items()]
    raise_all(RuleTypeError, "this layout cannot be written to a file:", problems)
    return "\n".join([*lines, *in_tables]).strip() + "\n"


def table_line(name: str, content: Any) -> str:
    """A table of a file of rules in one line.

    Args:
        name: Its name, such as ``"compute"``.
        content: Its rules; or what is in the table ``names``.

    >>> table_line("compute", AxisRules({"batch": "data"}))
    'compute = [["batch", "data"]]'
    >>> table_line("names", {"heads": None})
    'names = { heads = [] }'
    """
    if isinstance(content, AxisRules):
        return f"{name} = [{', '.join(_items(content.rules))}]"
    items = ", ".join(f"{_key(role)} = {_value(own)}" for role, own in content.items())
    return f"{name} = {{ {items} }}"


def _unknown(key: str) -> str:
    near = nearest_name(key, _KEYS)
    return f"{key}: is not known. " + (
        f"Did you mean {near}?" if near else f"There are {', '.join(_KEYS)}."
    )


def _read_table(found: Any, name: str) -> AxisRules:
    if isinstance(found, str):
        return read_rules_expression(found)
    if isinstance(found, Mapping):
        return _read_pairs(list(found.items()))
    if not isinstance(found, list):
        raise RuleTypeError(
            f"is {found!r}, and has to be a table such as [{name}], a list of pairs, or a text "
            'such as "fully_sharded()".'
        )
    rules: list[Rule] = []
    for item in found:
        if isinstance(item, str):
            rules += read_rules_expression(item).rules
        elif isinstance(item, list) and len(item) == 2 and isinstance(item[0], str):
            rules += _read_pairs([(item[0], item[1])]).rules
        else:
            raise RuleTypeError(
                f'has {item!r}, and each has to be a pair such as ["neurons", "model"], or a '
                'text such as "fully_sharded()".'
            )
    return AxisRules.from_rules(rules)


def _read_pairs(pairs: list[tuple[str, Any]]) -> AxisRules:
    problems = [
        f'{logical}: is {mesh!r}, and has to be a mesh axis such as "data", a list of mesh axes, '
        "or [], which leaves it whole."
        for logical, mesh in pairs
        if not _are_mesh_axes(mesh)
    ]
    raise_all(RuleTypeError, "these rules cannot be read:", problems)
    return AxisRules(
        [(logical, tuple(mesh) if isinstance(mesh, list) else mesh) for logical, mesh in pairs]
    )


def _are_mesh_axes(found: Any) -> bool:
    texts = found if isinstance(found, list) else [found]
    return all(isinstance(text, str) and text for text in texts)


def _name(found: Any) -> Any:
    """What a role is called: a name, several, or, by an empty list, nothing."""
    return tuple(found) or None if isinstance(found, list) else found


def _is_table(rules: tuple[Rule, ...]) -> bool:
    return len({rule.logical_axis for rule in rules if _is_pair(rule)}) == len(rules)


def _is_pair(rule: Rule) -> TypeGuard[NameRule]:
    return isinstance(rule, NameRule) and not rule.yields and not rule.for_activations


def _unwritable(table: str, rules: AxisRules) -> list[str]:
    return [
        f"{table}: logical axis {name!r} is a {type(name).__name__}, and files have texts alone."
        for name in rules.logical_axes
        if not isinstance(name, str)
    ]


def _items(rules: tuple[Rule, ...]) -> list[str]:
    items = []
    for rule in rules:
        if _is_pair(rule):
            items.append(f"[{_value(rule.logical_axis)}, {_mesh_axes(rule)}]")
        else:
            items.append(_value(_expression(rule)))
    return items


def _expression(rule: Rule) -> str:
    match rule:
        case NameRule(yields=True):
            return f"tensor_parallel({_code(rule.mesh_axes)}, axes=({rule.logical_axis!r},))"
        case NameRule():
            return f"data_parallel({_code(rule.mesh_axes)}, batch_axis={rule.logical_axis!r})"
        case LargestDimensionRule() | IdentityRule():
            return repr(AxisRules.from_rules([rule]))


def _code(mesh_axes: tuple[str, ...]) -> str:
    return repr(mesh_axes[0]) if len(mesh_axes) == 1 else repr(mesh_axes)


def _mesh_axes(rule: Any) -> str:
    axes = rule.mesh_axes
    return _value(axes[0] if len(axes) == 1 else list(axes))


def _key(name: Any) -> str:
    plain = isinstance(name, str) and name.isascii() and name.replace("-", "_").isidentifier()
    return str(name) if plain else _value(name)


def _value(value: Any) -> str:
    """A value in TOML, whose texts, lists and truth values are those of JSON."""
    if value is None:
        return "[]"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
