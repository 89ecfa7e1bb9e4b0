"""Turning one traced initialiser into a few small programs, each compiled once.

A model's initialiser, traced as a whole, is one long program with an output for every parameter.
Compiling it is slow, and running it holds every temporary at once. Most of its outputs are
computed alike, though, and differ only in the key that they start from. So the trace is

1. written out flat, without layouts (``flat_programs``): where results are laid out is planned, so
   constraints in the initialiser are taken out; nested calls that hide several outputs, or key
   derivations, are opened;
2. split into subprograms (``subprograms``): for each output the equations that it needs. Expensive
   work that several outputs share keeps them together in one subprogram, or is done once, before,
   when its result is small;
3. grouped (``grouping``): subprograms that are equal up to the integers from which keys are derived
   share one program;
4. run (``running``): each program is compiled once, for the layout of its outputs, and called for
   each of its subprograms.

``equation_traits`` says what single operations cost, and whether they give the same bits in any
layout. Nothing in this package knows about Penzai or about logical axes: the input is a traced
program and the layout of each of its outputs.
"""

from penzai_shard.placement.initializer_splitting.flat_programs import (
    flat_program,
    no_mesh_context,
)
from penzai_shard.placement.initializer_splitting.grouping import (
    Call,
    Program,
    SplitInitializer,
    split_initializer,
)
from penzai_shard.placement.initializer_splitting.running import run_split

__all__ = [
    "Call",
    "Program",
    "SplitInitializer",
    "flat_program",
    "no_mesh_context",
    "run_split",
    "split_initializer",
]
