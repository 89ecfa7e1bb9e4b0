"""Commands that answer a question: what they print, and the exit status.

The exit status is 0 if all is well, 1 if something was found, 2 if the question could not be
answered, as after a mistake in the command line. What was asked for goes to standard output, and
all else to standard error.
"""

import argparse
import difflib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from penzai_shard.text_tables import PLAIN_WIDTH, Report, TextTable, wrapped

# As a shell has it for a program that is ended since nobody reads its output.
_NOBODY_READS = 141


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, with what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit status 2."""
        self.exit(2, f"penzai-shard: {message}. See {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ``argparse`` has it; a command refuses options that it does not know itself."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1, 0.6)
            meant = f". Did you mean {near[0]}?" if near else ""
            self.error(f"unknown argument {unknown[0]!r}{meant}".removesuffix("."))
        return known, unknown


def add_answer_options(
    parser: argparse.ArgumentParser, rows: str = "a row for each array, also of equal blocks"
) -> None:
    """Adds the options of every command that answers a question; ``rows`` is what all are."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--all", action="store_true", help=rows)
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    parser.set_defaults(answers=True)


def answer(options: argparse.Namespace) -> int:
    """Runs a command.

    Args:
        options: What was parsed.

    Returns:
        The exit status.
    """
    # Another process may be training on the accelerators, and hold their memory.
    jax.config.update("jax_platforms", "cpu")
    return printed(lambda: options.run(options))


def printed(run: Callable[[], int]) -> int:
    """Runs what prints and gives an exit status, which is another where nobody reads to the end."""
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would report it once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    return status


def print_report(report: Report, options: argparse.Namespace) -> None:
    """Prints a report as it was asked for."""
    if options.json:
        print(report.to_json())
    else:
        print_table(report.table(collapse=not options.all))


def print_table(table: TextTable) -> None:
    """Prints a table, in colours on a terminal."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console().print(table)
    else:
        print(table)


def print_lines(*texts: str) -> None:
    """Prints sentences, each broken where the terminal ends."""
    width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns
    for text in texts:
        print("\n  ".join(wrapped(text, max(width - 2, 1))))
