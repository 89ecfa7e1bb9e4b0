"""Finds the layout in which a train step takes the least time and fits into the devices.

``workload`` is the step that is asked about, ``hardware`` are the devices, ``candidates`` are the
layouts. ``cost`` prices each of them by propagation, in a fraction of a second, from its
``device_program``; ``compiled`` prices a few by compiling them, deep models by the ``shallow`` ones
that they are cut to; ``search`` says which. ``choose`` puts it together, ``choices`` says why, and
``bound`` says what none can beat.
"""
