"""Measures by turns, and prints figures beside the floors that they have to hold.

A script yields each ``Figure`` as soon as it is found. It is printed as a row of a table, or with
``--json`` as a line that ``python -m benchmarks`` reads.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

ROOT = pathlib.Path(__file__).parents[1]
HEADINGS = ("work", "figure", "floor", "holds")
WIDTHS = (88, 64, 15, 5)


@dataclasses.dataclass(frozen=True)
class Figure:
    """What one work took.

    Attributes:
        work: The work, and what it is compared with.
        value: What it took; None where it could not be measured.
        unit: The unit of the value, ``x`` for a ratio.
        floor: What the value, rounded as it is printed, may be at most, or has to be at least.
        at_least: Whether more is better.
        digits: The decimals of the value.
        detail: The measurements behind the value, or why there is none.
    """

    work: str
    value: float | None
    unit: str = "x"
    floor: float | None = None
    at_least: bool = False
    digits: int = 2
    detail: str = ""

    @property
    def holds(self) -> bool:
        """Whether there is a value, and it holds its floor if it has one."""
        if self.value is None or self.floor is None:
            return self.value is not None
        value = round(self.value, self.digits)
        return value >= self.floor if self.at_least else value <= self.floor

    def cells(self) -> tuple[str, ...]:
        """The texts of its row."""
        unit = self.unit if self.unit in ("x", "") else f" {self.unit}"
        figure = "failed" if self.value is None else f"{self.value:.{self.digits}f}{unit}"
        # A message of several lines would end the row.
        figure += f" ({' '.join(self.detail.split())})" if self.detail else ""
        if self.floor is None:
            return self.work, figure, "", "" if self.holds else "no"
        floor = f"{'at least' if self.at_least else 'at most'} {self.floor:g}{unit}"
        return self.work, figure, floor, "yes" if self.holds else "no"


def make_parser(text: str) -> argparse.ArgumentParser:
    """A parser with the options that all scripts have."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    help_text = "small sizes, to see that all runs; their figures have no floors"
    parser.add_argument("--quick", action="store_true", help=help_text)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each figure")
    return parser


def print_figures(figures: Iterable[Figure], options: argparse.Namespace) -> bool:
    """Prints each figure when it is found; whether all hold their floors."""
    if not options.json:
        print(format_row(HEADINGS), "|---" * len(HEADINGS) + "|", sep="\n", flush=True)
    holds = True
    for figure in figures:
        if options.quick:
            # Floors are those of the sizes of a whole run.
            figure = dataclasses.replace(figure, floor=None)
        if options.json:
            print(json.dumps(dataclasses.asdict(figure)), flush=True)
        else:
            print(format_row(figure.cells()), flush=True)
        holds = holds and figure.holds
    return holds


def format_row(cells: Sequence[str]) -> str:
    """A row of the table, its cells as wide as most of them need."""
    padded = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)]
    return f"| {' | '.join(padded)} |"


def take_turns(
    measurements: Sequence[Callable[[], float]], rounds: int, warm_up: int = 1
) -> list[list[float]]:
    """What each measurement found in each round, without the rounds that warm up."""
    found: list[list[float]] = [[] for _ in measurements]
    for turn in range(warm_up + rounds):
        # Whoever is first finds colder caches, so every other round goes backwards.
        for which in range(len(measurements))[:: 1 if turn % 2 else -1]:
            value = measurements[which]()
            if turn >= warm_up:
                found[which].append(value)
    return found


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of rounds, which no change from round to round touches."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def run_anew(name: str, *args: str) -> str:
    """What a script of this folder prints in a new process."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *args]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
