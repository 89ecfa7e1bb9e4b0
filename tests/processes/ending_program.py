"""Two processes of which the second ends badly, while a checkpoint is being written.

``test_job`` starts it; it imports little, so that it starts soon.
"""

import os
import pathlib
import signal
import sys
import threading

import numpy as np

from penzai_shard.checkpoints.manager import CheckpointManager
from penzai_shard.processes.agreement import gather
from penzai_shard.processes.job import several_processes


def main(me, address, folder, ending):
    with several_processes(address, 2, me, heartbeat_seconds=3):
        CheckpointManager(folder).save(1, {"w": np.ones(10_000, "float32")})
        assert gather("meeting", me) == [0, 1]
        if me == 1 and ending == "error":
            raise KeyError("mine")
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(100)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4])
