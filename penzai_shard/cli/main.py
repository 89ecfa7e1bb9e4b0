"""Runs the command: errors are a line or a few, and have an exit status.

The status is 0 if all is well, 1 for an answer that is no, which ``commands`` says of each
subcommand, and 2 for a mistake in the call.
"""

import sys
from typing import NoReturn

from penzai_shard.errors import MissingExtraError, PlanError, ShardingError, require


def main() -> NoReturn:
    """Runs the command with the arguments of the process."""
    try:
        require("click", "cli")
        from penzai_shard.cli.commands import penzai_shard

        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        penzai_shard(arguments, prog_name="penzai-shard")
    except (ShardingError, MissingExtraError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, PlanError) else 2)
    sys.exit(0)
