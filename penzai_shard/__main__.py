"""``python -m penzai_shard`` is the command ``penzai-shard``."""

from penzai_shard.cli.main import main

if __name__ == "__main__":
    main()
