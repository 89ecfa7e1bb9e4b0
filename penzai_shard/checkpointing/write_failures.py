"""What is said of a save that could not be written: what was refused, and what to do."""

import errno
import os
import re
import shutil
from typing import NoReturn

from penzai_shard.errors import CheckpointWriteError
from penzai_shard.library_apis import orbax_api

# How the storage of Orbax, and safetensors, report a code of the operating system in their texts.
_CODE = re.compile(r"os_error_code='(\d+)'|os error (\d+)")


def raise_write_failure(error: Exception, where: str, size: int) -> NoReturn:
    """Raises what a failed save says.

    Args:
        error: What was met.
        where: The path that was saved to.
        size: How many bytes the arrays take.

    Raises:
        CheckpointWriteError: Always.
    """
    known = _known_reason(error, where, size)
    reason = (known or orbax_api.first_line(error)).removesuffix(".")
    old = " What is at the path stays as it was." if os.path.lexists(where) else ""
    text = f"cannot save to {where}: {reason}.{old}"
    raise CheckpointWriteError(text) from (None if known else error)


def _known_reason(error: Exception, where: str, size: int) -> str:
    """What the operating system refused, and what to do; empty if it was something else."""
    code = getattr(error, "errno", None)
    if code is None:
        found = _CODE.search(str(error))
        code = int(found[1] or found[2]) if found else None
    folder = _first_existing(os.path.dirname(where))
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(folder).free
        return (
            f"the disk is full. The arrays take {size:,} bytes, and {free:,} are free. Make room, "
            "or choose another disk."
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"the directory {folder} may not be written ({os.strerror(code)}). Choose one that "
            "may, or change its permissions."
        )
    if code in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        what = "takes no new directories" if os.path.isdir(folder) else "is a file"
        return f"{folder} {what}. Choose another path."
    return f"{os.strerror(code)}." if code else ""


def _first_existing(where: str) -> str:
    while not os.path.lexists(where) and where != os.path.dirname(where):
        where = os.path.dirname(where)
    return where
