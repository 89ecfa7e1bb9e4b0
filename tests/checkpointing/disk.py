"""A disk that writes when it is told to, and fails when it is told to."""

import errno
import threading

from penzai_shard.library_apis import orbax_api


class Disk:
    """Decides when what Orbax has begun to write is written, and whether it is.

    Attributes:
        may_write: Nothing is written before this is set.
    """

    def __init__(self, monkeypatch):
        self.may_write = threading.Event()
        self.may_write.set()
        self._failing = None
        begin = orbax_api.begin_save

        def begin_save(directory, *arguments):
            written = begin(directory, *arguments)
            fails = self._failing is not None and self._failing in directory
            if fails:
                self._failing = None

            def wait():
                self.may_write.wait(600)
                written()
                if fails:
                    raise OSError(errno.ENOSPC, "full")

            return wait

        monkeypatch.setattr(orbax_api, "begin_save", begin_save)

    def fails_once(self, name):
        """The next checkpoint of this name is not written."""
        self._failing = name
