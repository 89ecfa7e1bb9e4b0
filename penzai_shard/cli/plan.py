"""Plans a model from the command line, without making its arrays."""

import json
from typing import Any

from penzai_shard.cli import inputs
from penzai_shard.errors import PlanError
from penzai_shard.planning import arguments
from penzai_shard.planning.planner import examine


def print_plan(
    model: str, mesh: str, rules: str | None, as_json: bool, show_all: bool, **modes: Any
) -> None:
    """Prints a plan as a table or as JSON.

    Raises:
        PlanError: Some arrays have no valid layout. As JSON, the problems stand in it.
    """
    given = inputs.read_mesh(mesh), inputs.read_rules(rules)
    request = arguments.read("plan", *given, **modes)
    plan, problems, doubts = examine(inputs.read_model(model), request)
    if as_json:
        data = plan.to_data()
        rows = [{"path": p.path, "what": p.what, "fix": p.fix, "kind": p.kind} for p in problems]
        print(json.dumps({**data, "problems": rows, "doubts": doubts}, indent=2, default=str))
    problems.raise_if_any(PlanError)
    if not as_json:
        print(plan.table(collapse=not show_all))
        for doubt in doubts:
            print(doubt)
