"""Finds the layout in which a train step takes the least time and fits into the devices.

``workload`` is the step that is asked about, ``candidates`` are the layouts. ``cost`` prices each
of them by propagation, in a fraction of a second; ``compiled`` prices a few by compiling them;
``search`` says which. ``choices`` puts it together, and ``bound`` says what none can beat.
"""
