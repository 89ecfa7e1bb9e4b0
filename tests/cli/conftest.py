"""The command, run in a new folder."""

import sys

import pytest

from penzai_shard.cli import inputs
from penzai_shard.cli.main import main


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, request):
    """Calls the command: its status, what it prints, and its errors.

    The folder has the ``FILES`` of the test's module.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model", raising=False)
    monkeypatch.chdir(tmp_path)
    for name, text in getattr(request.module, "FILES", {}).items():
        (tmp_path / name).write_text(text)
    inputs._import_file.cache_clear()

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["penzai-shard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return call
