"""The start of the ``penzai-shard`` command, beside the package, which takes seconds to import."""

import sys


def main() -> int:
    """Imports the command line and runs it.

    Returns:
        Its exit status; 130 if Ctrl-C ends it, also while it is still being imported.
    """
    try:
        from penzai_shard.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("\npenzai-shard: stopped.", file=sys.stderr)
        return 130
