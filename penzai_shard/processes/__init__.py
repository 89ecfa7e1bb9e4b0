"""Jobs of several operating system processes: what they agree on, and arrays that they share.

Under ``jax.distributed`` every process runs the same program, and holds the part of each array that
is on its own devices. Messages go through the coordination service of ``jax.distributed``, and
not through the devices: they need no compiled program, and may be sent from any thread while a
program runs.
"""

from penzai_shard.processes.agreement import (
    any_process,
    failing_together,
    on_first_process,
    said_by_first,
    totals_of_processes,
)
from penzai_shard.processes.differences import begin_together, refuse_differences
from penzai_shard.processes.job import before_job_ends, several_processes, under_way
from penzai_shard.processes.own_parts import Parts, array_of_parts, parts_along
from penzai_shard.processes.whole_values import (
    checksum_of,
    host_data,
    is_on_this_process,
    layout_text,
    processes_of,
    put_all,
    resharded,
)

__all__ = [
    "Parts",
    "any_process",
    "array_of_parts",
    "before_job_ends",
    "begin_together",
    "checksum_of",
    "failing_together",
    "host_data",
    "is_on_this_process",
    "layout_text",
    "on_first_process",
    "parts_along",
    "processes_of",
    "put_all",
    "refuse_differences",
    "resharded",
    "said_by_first",
    "several_processes",
    "totals_of_processes",
    "under_way",
]
