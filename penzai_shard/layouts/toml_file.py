"""Reads and writes layouts as TOML.

A file names a preset with its options, or has the fields of ``Layout``: rules as tables, or as
lists with a table for each rule. An empty list stands for None. It may say of the step, too, what
its mesh is, and into how many microbatches a batch is split.
"""

import dataclasses
import json
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, Self

from penzai_shard.errors import Problems, RuleTypeError, ShardingError
from penzai_shard.layouts.presets import FIELDS, PRESETS, TABLES, add_unknown
from penzai_shard.rules import AxisRules, Rule

_FIELDS = (*TABLES, *FIELDS)
_KEYS = ("layout", "options", *_FIELDS, "mesh", "microbatches")
_OF_RULES = {field.name: field.default for field in dataclasses.fields(Rule)}


@dataclasses.dataclass(frozen=True)
class LayoutFile:
    """What a file says.

    Attributes:
        layout: The layout.
        mesh_shape: The size of each mesh axis by name; None if the file does not say.
        microbatches: ``accumulate_steps`` of the step; None if the file does not say.
    """

    layout: Any
    mesh_shape: dict[str, int] | None = None
    microbatches: int | None = None


class LayoutFiles:
    """How a ``Layout`` is read from a file, and written."""

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a layout from a TOML file.

        Raises:
            RuleTypeError: The file cannot be read; all that is wrong is in it.
        """
        layout: Self = cls.read_toml(path).layout
        return layout

    @classmethod
    def read_toml(cls, path: str | os.PathLike[str]) -> LayoutFile:
        """Reads a layout from a TOML file, and what it says of mesh and microbatches.

        Raises:
            RuleTypeError: The file cannot be read; all that is wrong is in it.
        """
        file, problems = pathlib.Path(path), Problems(f"{os.fspath(path)}:")
        try:
            found = tomllib.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            problems.add("", str(error).rstrip("."), "Give the path of a file in TOML.")
            raise RuleTypeError(problems.headline, problems) from error
        add_unknown(problems, "", found, _KEYS)
        if ("layout" in found) == ("parameters" in found):
            fix = 'Write layout = "fully_sharded", or the tables [parameters] and [compute].'
            problems.add("layout", "either a preset or parameters are needed", fix)
        preset = found.get("layout", "zero1")
        if not isinstance(options := found.get("options", {}), dict):
            problems.add("options", f"{options!r} is no table", "Write options = { min_size = 8 }.")
        add_unknown(problems, "layout", [preset], PRESETS)
        try:
            given = found.keys() & {*_FIELDS}
            fields = {key: _read_field(key, found[key], problems) for key in given}
            problems.raise_if_any(RuleTypeError)
            if "layout" in found:
                layout = getattr(cls, preset)(**_read_value(options))
                layout = dataclasses.replace(layout, **fields)
            else:
                layout = cls(**{"compute": {"batch": "data"}} | fields)
        except ShardingError as error:
            raise RuleTypeError(problems.headline, error.problems) from error
        return LayoutFile(layout, found.get("mesh"), found.get("microbatches"))

    def to_toml(
        self,
        path: str | os.PathLike[str],
        *,
        mesh_shape: Mapping[str, int] | None = None,
        microbatches: int | None = None,
    ) -> None:
        """Writes the layout to a file, which ``from_toml`` reads.

        Args:
            path: The file.
            mesh_shape: What the file is to say of the mesh.
            microbatches: What it is to say of microbatches.

        Raises:
            RuleTypeError: A field has no form in TOML, such as types of layers in ``blocks``.
        """
        fields = {"mesh": mesh_shape, "microbatches": microbatches}
        fields |= {name: getattr(self, name) for name in _FIELDS}
        problems = Problems("Layout.to_toml:")
        lines = []
        for name, value in fields.items():
            try:
                if value not in (None, False, {}):
                    lines.append(f"{name} = {_write_value(value)}\n")
            except TypeError as error:
                problems.add(name, str(error), "Leave it out, and say it in Python.")
        problems.raise_if_any(RuleTypeError)
        pathlib.Path(path).write_text("".join(lines), encoding="utf-8")


def _read_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read_value(own) for key, own in value.items()}
    return (tuple(map(_read_value, value)) or None) if isinstance(value, list) else value


def _read_field(name: str, given: Any, problems: Problems) -> Any:
    if name not in TABLES:
        return () if name == "blocks" and given == [] else _read_value(given)
    if isinstance(given, dict):
        return AxisRules(_read_value(given))
    rows = given if isinstance(given, list) else [given]
    rows = [row if isinstance(row, dict) else {str(row): row} for row in rows]
    for row in rows:
        add_unknown(problems, name, row, _OF_RULES)
    lacking: dict[str, Any] = {"logical_axis": None, "mesh_axes": []}
    return AxisRules.from_data([] if problems else [lacking | row for row in rows])


def _write_value(value: Any) -> str:
    if isinstance(value, AxisRules):
        rows = [
            {name: own for name, own in row.items() if own not in (None, _OF_RULES[name])}
            for row in value.to_data()
        ]
        return "[\n" + "".join(f"  {_write_value(row)},\n" for row in rows) + "]"
    if isinstance(value, Mapping):
        pairs = [f"{json.dumps(key)} = {_write_value(own)}" for key, own in value.items()]
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write_value, value))}]"
    return "[]" if value is None else json.dumps(value, ensure_ascii=False)
