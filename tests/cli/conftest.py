"""The command, run in a new folder."""

import sys

import pytest

from penzai_shard.cli import inputs
from penzai_shard.cli.main import main


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Calls the command: its status, what it prints, and its errors."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    inputs.read_object.cache_clear()
    inputs._import_file.cache_clear()

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["penzai-shard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return call
