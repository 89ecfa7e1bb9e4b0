"""Is the layout that is chosen the best there is? Every sane layout of small steps is compiled.

For each pair of a model and devices all sane layouts are compiled, and priced by code that shares
nothing with the library's own prices. The same layouts are searched as ``choose_layout`` does, with
places for a half of them in the second stage and at most 12, or a sixth, in the one that compiles
(twice as many where that seems to be worth it), under limits of memory into which all of
them fit, half, a tenth, and one. The table says how well the quicker stages rank the layouts
(Spearman's coefficient, 1 for the same order), by how much longer each pick takes than the best
that fits, and by how much it is over the limit by the judge's memory; ``apart`` is how far times
and memory as the search compiled them are from the judge's.

Sizes are those of real models, but that there are few blocks: compiling takes as long for small
arrays. Seconds are those of the processor, which other load on the machine touches little.

Those of ``--held-out`` were written when the search was done, and judged before it was mended.

With ``--every-table`` it is the list of sane layouts that is judged: of three small problems every
table from logical axes to mesh axes is compiled, or as many drawn by chance as ``most`` says, for
parameters, optimizer, and activations; is any faster than the best of the list?

    python -m benchmarks.choosing [--quick] [--held-out] [--pairs NAME ...]
    python -m benchmarks.choosing --every-table
"""

import argparse
import os
import resource
import sys
from collections.abc import Sequence

import jax

from benchmarks.choosing.every_table import PROBLEMS, compared
from benchmarks.choosing.judged import FITTING, Judged, judged
from benchmarks.choosing.pairs import HELD_OUT, PAIRS, QUICK

# The largest mesh of the pairs; JAX reads the flag when it first looks for devices.
_DEVICES = "--xla_force_host_platform_device_count=16"
# By so much a pick may be slower than the best.
ALLOWED = 0.02
# The limit under which picks are counted as the best: half of the layouts fit.
_COUNTED = "half"
_HEADS_OF_TABLES = ("tables", "listed", "faster", "lacking", "seconds")


def _seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _cells(one: Judged, seconds: float) -> list[str]:
    most = max(pick.compiled for pick in one.picks.values())
    over = max(pick.over for pick in one.picks.values())
    return [
        f"{one.count}",
        f"{most}",
        *(f"{coefficient:.2f}" for coefficient in one.spearman.values()),
        *("nothing" if pick.slower > 1e9 else f"{pick.slower:.1%}" for pick in one.picks.values()),
        "no" if not over else f"{over:.1%}",
        "yes" if one.is_refused else "no",
        " ".join(f"{part:.0%}" for part in one.apart),
        f"{seconds:.0f}",
    ]


def _every_table() -> int:
    print(f"{'problem':24}" + "".join(f"{head:>11}" for head in _HEADS_OF_TABLES))
    lacking = 0
    for name, (step, devices, mesh_shape, most) in PROBLEMS.items():
        start = _seconds()
        found = compared(step(), devices, mesh_shape, most)
        missed = found.lacking(ALLOWED)
        lacking += len(missed)
        cells = (len(found.tables), len(found.listed), f"{found.faster:.1%}", len(missed))
        cells += (f"{_seconds() - start:.0f}",)
        print(f"{name:24}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
        for table, faster in missed.items():
            one = found.tables[table]
            print(f"  {faster:.1%} faster in {one.memory / 1e6:.0f} MB: {table}", flush=True)
        jax.clear_caches()
    return 1 if lacking else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges the pairs, prints a table, and says whether the picks are as good as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two pairs alone")
    parser.add_argument("--held-out", action="store_true", help="what the search had not seen")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, help="these pairs alone")
    parser.add_argument("--every-table", action="store_true", help="judge the list of layouts")
    options = parser.parse_args(arguments)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}"
    if options.every_table:
        return _every_table()
    asked_for = QUICK if options.quick else HELD_OUT if options.held_out else PAIRS
    names = options.pairs or tuple(asked_for)
    heads = ["layouts", "compiled", "names", "propagated", *FITTING, "over", "refused", "apart"]
    heads.append("seconds")
    print(f"{'pair':24}" + "".join(f"{head:>11}" for head in heads))
    answers = []
    for name in names:
        start = _seconds()
        one = judged(PAIRS[name])
        answers.append(one)
        cells = _cells(one, _seconds() - start)
        print(f"{name:24}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
        jax.clear_caches()
    picks = [pick for one in answers for pick in one.picks.values()]
    good = sum(pick.slower <= ALLOWED for pick in picks)
    over = sum(pick.over > 0 for pick in picks)
    best = sum(one.picks[_COUNTED].is_best for one in answers)
    print(
        f"{good} of {len(picks)} picks within {ALLOWED:.0%} of the best, {over} over the memory "
        f"limit; where half fit, {best} of {len(answers)} are the best"
    )
    refused = all(one.is_refused for one in answers)
    return 0 if good == len(picks) and not over and refused else 1


if __name__ == "__main__":
    sys.exit(main())
