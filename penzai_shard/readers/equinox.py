"""Says what modules of Equinox are: their arrays have no names, and their numbers are settings.

Every field that is not declared static is a part of the tree: the rate of a dropout, a function.
As for Equinox itself (``eqx.is_array``), arrays alone are arrays there.
"""

from typing import Any

import equinox

from penzai_shard.readers.reader import Content


class _Modules:
    library = "equinox"

    def reads(self, kind: type) -> bool:
        return False

    def is_module(self, kind: type) -> bool:
        return issubclass(kind, equinox.Module)

    def open(self, node: Any) -> Content:
        return Content(node)

    def close(self, template: Any, data: Any) -> Any:
        return data


READERS = [_Modules()]
