"""What ``import penzai_shard`` adds to the imports of jax, penzai and treescope.

Each round is a new process, in which the parts take their turns; medians are printed.

    python -m benchmarks.imports [--rounds N]
"""

import statistics
import sys
import time
from collections.abc import Iterator

from benchmarks.measure import Figure, make_parser, print_figures, run_anew


def milliseconds(*names: str) -> float:
    started = time.perf_counter()
    for name in names:
        __import__(name)
    return (time.perf_counter() - started) * 1000


def import_all() -> None:
    """Prints the milliseconds of their imports and of ours, and how many modules ours are."""
    theirs = milliseconds("jax", "penzai.pz", "treescope")
    ours = milliseconds("penzai_shard")
    print(theirs, ours, sum(name.partition(".")[0] == "penzai_shard" for name in sys.modules))


def measure(rounds: int) -> Iterator[Figure]:
    # The first process writes the compiled files that the others read.
    found = [run_anew("imports", "--import").split() for _ in range(rounds + 1)][1:]
    theirs, ours, modules = (
        statistics.median(map(float, column)) for column in zip(*found, strict=True)
    )
    detail = f"jax, penzai and treescope: {theirs:.0f} ms"
    work = "import of penzai_shard after jax, penzai and treescope"
    yield Figure(work, ours, "ms", floor=5, digits=1, detail=detail)
    yield Figure("modules of penzai_shard that its import loads", modules, "", floor=4, digits=0)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--import", action="store_true", dest="imports", help="one round")
    options = parser.parse_args()
    if options.imports:
        import_all()
        return
    print_figures(measure(1 if options.quick else options.rounds), options)


if __name__ == "__main__":
    main()
