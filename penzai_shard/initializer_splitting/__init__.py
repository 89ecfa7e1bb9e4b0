"""Turning one traced initialiser into a few small programs, each compiled once.

A model's initialiser, traced as a whole, is one long program with an output for every parameter.
Compiling it is slow, and running it holds every temporary at once. Most of its outputs are
computed alike, though, and differ only in the key that they start from. So the trace is

1. freed of layouts (``layout_removal``): where results lie is planned, so that constraints in the
   initialiser are taken out;
2. flattened (``flattening``): nested calls that hide several outputs, or key derivations, are
   written out;
3. cut into pieces (``pieces``): for each output the equations that it needs. Expensive work that
   several outputs share keeps them together in one piece, or is done once ahead when its result
   is small;
4. grouped (``programs``): pieces that are equal up to the integers from which keys are derived
   share one program;
5. run (``running``): each program is compiled once, for the layout of its outputs, and run for
   each of its pieces.

Nothing here knows about Penzai or about logical axes: the input is a jaxpr and the layout of each
of its outputs.
"""

from penzai_shard.initializer_splitting.layout_removal import no_mesh_context, without_layouts
from penzai_shard.initializer_splitting.programs import Program, SplitInitializer, split_initializer
from penzai_shard.initializer_splitting.running import run_split

__all__ = [
    "Program",
    "SplitInitializer",
    "no_mesh_context",
    "run_split",
    "split_initializer",
    "without_layouts",
]
