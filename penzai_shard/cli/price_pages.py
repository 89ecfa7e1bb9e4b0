"""``penzai-shard price --report``: the page of a step that is priced."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from penzai_shard.cli.asked_steps import AskedStep, StepPrice
from penzai_shard.cli.chosen_steps import batch_of_tokens, sequences
from penzai_shard.cli.lint_commands import linted
from penzai_shard.meshes import mesh_text
from penzai_shard.views.page_content import Missing, PageContent
from penzai_shard.views.report_page import plan_for_page, why_for_page, write_page

_STEP_ALONE = Missing(
    "The step was given without its model and rules. How its arrays are laid out is in Memory."
)
_NO_LAYOUT = Missing("Without a valid layout there is no step to be priced.")
_TOO_LARGE = Missing("The step is too large for the devices, and has no program to look into.")


def write_price_page(
    asked: AskedStep,
    found: StepPrice | None,
    options: argparse.Namespace,
    notes: Sequence[str],
) -> None:
    """Writes the page, and says where it is.

    Args:
        asked: The step that was asked for.
        found: What it needs and moves; None if its model has no valid layout.
        options: What was parsed.
        notes: What else is to be said on the page, in sentences.
    """
    of_layout: dict[str, Any] = {"plan": _STEP_ALONE, "lint": _STEP_ALONE}
    if asked.model is not None and asked.layout is not None:
        model, layout = asked.model.model, asked.layout
        plan = plan_for_page(model, layout.mesh, layout.layout, layout.on_indivisible)
        # A model that is not a published one may take anything, unless it was called with tokens.
        takes_tokens = found is not None or asked.model.published is not None
        batch = batch_of_tokens(sequences(layout, options), options.seq) if takes_tokens else None
        lint = linted(model, layout, options, on_unnamed="replicate", batch=batch)
        of_layout = {"plan": plan, "lint": lint}
    of_step: dict[str, Any] = dict.fromkeys(("memory", "collectives", "why"), _NO_LAYOUT)
    if found is not None:
        of_step = {
            "memory": found.memory,
            "collectives": found.moved or _TOO_LARGE,
            "why": _TOO_LARGE if found.program is None else why_for_page(found.program),
        }
        notes = (
            f"Devices: {found.devices}.",
            *notes,
            *found.certainty(),
            *asked.notes,
            *found.notes,
        )
    content = PageContent(
        title=options.model if asked.model is None else asked.model.name,
        mesh=_mesh_text(asked, found),
        notes=(*asked.lines(), *notes),
        **of_layout,
        **of_step,
    )
    path = write_page(content, options.report)
    print(f"penzai-shard: the page is {path}", file=sys.stderr, flush=True)


def _mesh_text(asked: AskedStep, found: StepPrice | None) -> str:
    if asked.layout is not None:
        return mesh_text(asked.layout.mesh)
    mesh = None if found is None or found.program is None else found.program.step.mesh
    return "" if mesh is None else mesh_text(mesh)
