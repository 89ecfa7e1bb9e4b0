"""What the processes of one job agree on, and how they put arrays on the devices of all of them.

A job is one program that runs in several processes, as ``jax.distributed.initialize`` makes it.
Every process makes the same calls in the same order; with one process they cost nothing.
"""
