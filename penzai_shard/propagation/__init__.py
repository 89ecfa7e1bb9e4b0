"""Layouts as XLA will propagate them, found without devices and without compiling.

What a step's arrays are laid out as is decided by Shardy, the first of the partitioner's passes.
This room runs that pass on a lowered program, in the form in which XLA runs it, and reads the
program as one flat list of operations. `causes`, `naming` and `choosing` stand on it.
"""
