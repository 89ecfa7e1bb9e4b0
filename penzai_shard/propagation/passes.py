"""Runs Shardy's propagation on a module, without devices.

These are the passes that XLA runs, up to the one that propagates. Shardy's options for its own
developers leave notes behind: which mesh axis went from where to where (edges), and which argument,
result or constraint it came from at first (origins). Notes change no layout; the tests compare.

Written for and run on jaxlib 0.10.2 and 0.12.0. https://openxla.org/shardy/propagation
"""

import re

from jaxlib import version
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from penzai_shard.errors import Problem, Problems, PropagationError
from penzai_shard.propagation.xla_form import HEADLINE, Mlir, operations_in

_PIPELINE = "sdy-propagation-pipeline"
_PROPAGATE = "sdy-user-priority-propagate"
# Behind the propagation: how arguments and results are laid out where lengths do not divide.
_AT_THE_ENDS = (
    "sdy-update-non-divisible-input-output-shardings,sdy-remove-sub-axes-in-input-output-shardings"
)


def propagate(module: Mlir, *, notes: bool = False) -> None:
    """Lays out all values of a module, which is changed; its context has to be in force.

    Args:
        module: A module in the form of XLA, see ``xla_form``.
        notes: Whether Shardy notes where each mesh axis of a layout came from at first, and at each
            operation which mesh axes went from where to where. The former is never done where
            arrays are tied by ``shard_alike``: there it ends the process.

    Raises:
        PropagationError: Shardy refuses the program, or this jaxlib has other passes.
    """
    problems = Problems(HEADLINE)
    origins = notes and not operations_in(module, "sdy.sharding_group")
    passes = _make_passes(notes, origins)
    try:
        passes.run(module)
    except ir.MLIRError as error:
        for each in error.error_diagnostics:
            # A message's location does not know yet that it is one with a name.
            location = ir.Location.from_attr(each.location.attr)
            path = location.name_str if isinstance(location, ir.NameLoc) else ""
            problems.add(path, f"Shardy says: {each.message}", kind="refused")
        raise PropagationError(HEADLINE, problems) from error


def _make_passes(edges: bool, origins: bool) -> PassManager:
    try:
        whole = str(PassManager.parse(f"builtin.module({_PIPELINE})"))
        before, _, behind = whole.partition(_PROPAGATE)
        options = behind.partition("}")[0]
        if edges:
            before = _switch_on(before, "debug-propagation-edge-sharding")
            options = _switch_on(options, "debug-propagation-edge-sharding")
        if origins:
            # Never before: sdy-apply-sharding-constraints puts constraints before a shard_map, and
            # would read their names, which it has not given them. That ends the process.
            options = _switch_on(options, "debug-sharding-origins")
        # sdy-save-module writes files, and cannot be parsed by the name that is printed.
        before = re.sub(r"sdy-save-module(\{[^{}]*\})?,", "", before)
        passes = PassManager.parse(f"{before}{_PROPAGATE}{options}}},{_AT_THE_ENDS})")
    except ValueError as error:
        what = f"jaxlib {version.__version__} has other passes than are known: {error}"
        problem = Problem("", what, "Install jaxlib 0.10.2.", "other jaxlib")
        raise PropagationError(HEADLINE, [problem]) from error
    # It refuses what Shardy notes on loops.
    passes.enable_verifier(False)
    return passes


def _switch_on(passes: str, option: str) -> str:
    if f"{option}=false" not in passes:
        raise ValueError(f"no option {option}")
    return passes.replace(f"{option}=false", f"{option}=true")
