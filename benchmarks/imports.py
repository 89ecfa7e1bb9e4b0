"""What ``import penzai_shard`` adds to the imports of jax, penzai and treescope.

Each round is a new process, in which the parts take their turns; medians are printed.

    python benchmarks/imports.py [--rounds N]
"""

import argparse
import statistics
import subprocess
import sys

SCRIPT = """
import sys, time

def milliseconds(*names):
    started = time.perf_counter()
    for name in names:
        __import__(name)
    return (time.perf_counter() - started) * 1000

theirs = milliseconds("jax", "penzai.pz", "treescope")
ours = milliseconds("penzai_shard")
print(theirs, ours, sum(name.partition(".")[0] == "penzai_shard" for name in sys.modules))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds + 1):
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rounds.append([float(figure) for figure in done.stdout.split()])
    # The first process writes the compiled files that the others read.
    theirs, ours, modules = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    print("| import | figure | floor |\n|---|---|---|")
    print(f"| jax, penzai and treescope | {theirs:.0f} ms | |")
    print(f"| penzai_shard after them | {ours:.1f} ms | 5 ms |")
    print(f"| modules of penzai_shard | {modules:.0f} | fewer than 5 |")


if __name__ == "__main__":
    main()
