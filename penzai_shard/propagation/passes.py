"""Runs Shardy's passes on a module, with notes on what went where."""

import re
from typing import Any

import jax
import jaxlib
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from penzai_shard.errors import Problems, PropagationError
from penzai_shard.propagation.xla_form import main_block, name_of

LAID_OUT = "penzai_shard.laid_out"
"""Attribute of an argument that has a layout before propagation."""
_PROPAGATE = re.compile(r"(.*)(sdy-user-priority-propagate\{[^{}]*\})", re.DOTALL)
_AT_THE_ENDS = (
    "sdy-update-non-divisible-input-output-shardings,sdy-remove-sub-axes-in-input-output-shardings"
)


def propagate(module: Any, *, origins: bool = False, edges: bool = False) -> None:
    """Propagates layouts through a module, which is changed; its context has to be in force."""
    problems = Problems("layouts cannot be propagated:")
    for argument in main_block(module).arguments:
        if isinstance(argument.type, ir.RankedTensorType) and not argument.type.has_static_shape:
            problems.add(
                name_of(argument),
                f"has an unknown length: {argument.type}",
                "Lower the step for known shapes.",
                kind="unknown shape",
            )
    problems.raise_if_any(PropagationError)
    _note_layouts(main_block(module).owner)
    passes = PassManager.parse(_pipeline(origins, edges))
    passes.enable_verifier(False)  # Shardy refuses its own notes on loops.
    try:
        passes.run(module)
    except Exception as error:
        problems.add("", f"Shardy says: {error}", kind="refused")
        raise PropagationError(problems.headline, problems) from error


def _note_layouts(main: Any) -> None:
    if "arg_attrs" in main.attributes:
        given = [
            dict((a.name, a.attr) for a in _items(each)) for each in main.attributes["arg_attrs"]
        ]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(
            [
                ir.DictAttr.get(
                    each | ({LAID_OUT: ir.UnitAttr.get()} if "sdy.sharding" in each else {})
                )
                for each in given
            ]
        )


def _items(attributes: Any) -> list[Any]:
    return [attributes[n] for n in range(len(attributes))]


def _pipeline(origins: bool, edges: bool) -> str:
    whole = str(PassManager.parse("builtin.module(sdy-propagation-pipeline)"))
    found = _PROPAGATE.match(whole)
    if found is None:
        problems = Problems("layouts cannot be propagated:")
        problems.add("", f"jaxlib {jaxlib.__version__} has no sdy-user-priority-propagate")
        problems.raise_if_any(PropagationError)
        raise AssertionError
    before, last = (
        found[1],
        found[2].replace("keep-sharding-rules=false", "keep-sharding-rules=true"),
    )
    if edges:
        before, last = (
            t.replace(
                "debug-propagation-edge-sharding=false", "debug-propagation-edge-sharding=true"
            )
            for t in (before, last)
        )
    if origins:
        # Never in sdy-apply-sharding-constraints: there Shardy reads names that it has not given.
        last = last.replace("debug-sharding-origins=false", "debug-sharding-origins=true")
    return re.sub(r"sdy-save-module(\{[^{}]*\})?,", "", f"{before}{last},{_AT_THE_ENDS})")
