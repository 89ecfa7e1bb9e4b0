"""Lints a model from the command line, without making its arrays."""

from typing import Any

from penzai_shard.cli import inputs
from penzai_shard.findings.lint import lint


def print_lint(
    model: str, mesh: str, rules: str | None, batch: str | None, as_json: bool, **modes: Any
) -> bool:
    """Prints what ``lint`` finds as a table or as JSON, and returns whether that is nothing.

    Raises:
        SelectionError, MeshError, RuleTypeError: The model, the mesh or the rules cannot be read.
    """
    # A reference may be that of a layout.
    given = inputs.read_object(rules) if ":" in (rules or "") else inputs.read_rules(rules)
    called_with = None if batch is None else inputs.read_object(batch)
    if callable(called_with):
        called_with = inputs.build_abstract(called_with)
    set_up = inputs.read_model(model), inputs.read_mesh(mesh), given
    report = lint(*set_up, batch=called_with, **modes)
    print(report.to_json() if as_json else report)
    return report.ok
