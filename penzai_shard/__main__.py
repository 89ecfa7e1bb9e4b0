"""``python -m penzai_shard``: the command line."""

import sys

from penzai_shard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
