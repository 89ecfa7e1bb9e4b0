"""Which readers there are: our own, and those that other packages announce by an entry point.

A reader is loaded once the library that it is for was imported by somebody else, since only then
can a tree hold objects of that library.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import sys

from penzai_shard.errors import warn_caller
from penzai_shard.readers.array_reader import ArrayReader

ENTRY_POINTS = "penzai_shard.readers"
"""The group of entry points under which other packages announce their readers.

The name of an entry point is the module that must have been imported for its reader to be loaded;
what it refers to is an ``ArrayReader``.
"""

# The module that must have been imported, and the reader.
OWN_READERS: dict[str, str] = {
    "flax.core.meta": "penzai_shard.readers.flax_linen:READER",
    "flax.nnx": "penzai_shard.readers.flax_nnx:READER",
    "haliax.core": "penzai_shard.readers.haliax_arrays:READER",
    "torch": "penzai_shard.readers.torch_tensors:READER",
}


@dataclasses.dataclass(frozen=True)
class Announcement:
    """That there is a reader.

    Attributes:
        library: The module that must have been imported for the reader to be loaded.
        reference: The reader, as ``module:name``.
        package: The installed package that announces it; empty for our own.
    """

    library: str
    reference: str
    package: str = ""

    def __str__(self) -> str:
        if not self.package:
            return f"penzai_shard's own reader {self.reference!r}"
        return f"the reader {self.reference!r} of the package {self.package!r}"

    def is_for(self, node_type: type) -> bool:
        """Whether a type, or one that it derives from, is of the library or its package."""
        package = self.library.partition(".")[0]
        return any(base.__module__.partition(".")[0] == package for base in node_type.__mro__)

    def loaded(self) -> ArrayReader | None:
        """The reader, or None if it cannot be loaded; that is warned of once, and kept."""
        reader, problem = _loaded(self)
        if problem:
            self.warn_once(problem)
        return reader

    def warn_once(self, problem: str) -> None:
        """Warns of what is wrong with the reader, for those who use nothing that it is for."""
        if self not in _warned:
            _warned.add(self)
            warn_caller([f"{problem} Until then nothing of {self.library!r} is read."])

    def mend(self) -> str:
        """What to do about a reader that is broken."""
        if not self.package:
            return "Install releases of that library and of penzai_shard that fit each other."
        return f"Mend that package, or uninstall it: pip uninstall {self.package}."

    def problem(self) -> str:
        """Why it cannot be loaded, and a fix; empty if it can."""
        return _loaded(self)[1]


_warned: set[Announcement] = set()


def active_announcements() -> list[Announcement]:
    """Those whose library was imported."""
    # None stands there for a module that may not be imported.
    return [found for found in announcements() if sys.modules.get(found.library) is not None]


@functools.cache
def announcements() -> tuple[Announcement, ...]:
    """All of them, our own first."""
    own = [Announcement(*both) for both in OWN_READERS.items()]
    others = [
        Announcement(found.name, found.value, found.dist.name if found.dist else "without a name")
        for found in importlib.metadata.entry_points(group=ENTRY_POINTS)
    ]
    return *own, *sorted(set(others), key=lambda found: (found.package, found.library))


@functools.cache
def _loaded(announced: Announcement) -> tuple[ArrayReader | None, str]:
    module, _, name = announced.reference.partition(":")
    mend = announced.mend()
    try:
        reader = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:
        # Whatever happens in a package of somebody else's, what it is not for goes on.
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
        return None, f"{announced}, for {announced.library!r}, {reason}. {mend}"
    if isinstance(reader, ArrayReader) and reader.library == announced.library:
        return reader, ""
    if isinstance(reader, ArrayReader):
        reason = f"says that it is for {reader.library!r}. Give both the same name"
    elif isinstance(reader, type) and issubclass(reader, ArrayReader):
        reason = f"is a class. Refer to an instance of it: READER = {reader.__name__}()"
    else:
        reason = (
            f"is a {type(reader).__name__}, not an ArrayReader. Refer to an instance of a class "
            "that derives from penzai_shard.readers.ArrayReader"
        )
    return None, f"{announced}, for {announced.library!r}, {reason}. {mend}"
