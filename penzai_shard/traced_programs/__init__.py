"""Traced programs (jaxprs): walking through one, and saying where an operation was written.

What every reader of programs needs, and nothing that one of them decides. ``layers`` follows split
dimensions through the program of a layer; ``placement`` flattens, splits and groups those of
initialisers; ``surgery.equivalence`` runs those of models in float64.
"""

from penzai_shard.traced_programs.elementwise import ELEMENTWISE
from penzai_shard.traced_programs.passed_through import passed_through
from penzai_shard.traced_programs.replacing import (
    asks_for_sharding,
    in_place_of,
    is_call_with_options,
    is_plain_call,
    with_parameters,
)
from penzai_shard.traced_programs.source_locations import (
    exception_location_text,
    function_name,
    location_text,
    public_name,
)
from penzai_shard.traced_programs.walking import (
    called_program,
    equations,
    evaluate,
    inner_programs,
    is_jit,
    opened,
    program_of,
    walk,
)

__all__ = [
    "ELEMENTWISE",
    "asks_for_sharding",
    "called_program",
    "equations",
    "evaluate",
    "exception_location_text",
    "function_name",
    "in_place_of",
    "inner_programs",
    "is_call_with_options",
    "is_jit",
    "is_plain_call",
    "location_text",
    "opened",
    "passed_through",
    "program_of",
    "public_name",
    "walk",
    "with_parameters",
]
