"""How near the prices by propagation come to what compiled steps cost: ratios of both.

    python -m benchmarks.choosing.prices --cache FOLDER [--pairs NAME ...] [--each]

A line for each pair: of time, operations, bytes sent and memory the least ratio, the median, the
most; and how long a layout takes to price. ``--each`` also lists layouts more than 5 % away.
"""

import argparse
import pathlib
import statistics
import time
import warnings
from collections.abc import Sequence

from benchmarks.choosing.pairs import PAIRS
from benchmarks.choosing.picks import Question, Verdict, read_truth
from penzai_shard.choosing.cost import Prices


def _text(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} {statistics.median(ratios):.2f} {max(ratios):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=pathlib.Path, required=True, help="a folder for the truth")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=[*PAIRS])
    parser.add_argument("--each", action="store_true")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in options.pairs:
        question = Question.read(PAIRS[name])
        truth = read_truth(name, question, options.cache)
        prices, rows, start = Prices(question.workload), [], time.process_time()
        for one in question.candidates:
            if (known := truth.get(one.words)) is None:
                continue
            cost, sizes = prices.price(one), dict(one.mesh_sizes)
            # Both are judged by the same arithmetic.
            sent = {",".join(axes): count for axes, count in cost.traffic.items()}
            found = Verdict(cost.flops, sent, cost.memory_bytes, round(cost.memory["optimizer"]))
            seconds = [x.price(sizes, question.hardware)[0] for x in (found, known)]
            traffic = [sum(x.sent.values()) or 1.0 for x in (found, known)]
            pairs = seconds, (found.flops, known.flops), traffic, (found.memory, known.memory)
            rows.append((*(a / b for a, b in pairs), one.words))
            if options.each and abs(rows[-1][0] - 1) > 0.05:
                print(
                    "  time {:.2f} operations {:.2f} sent {:.2f} memory {:.2f}: {}".format(
                        *rows[-1]
                    )
                )
        each = (time.process_time() - start) / max(len(rows), 1)
        labels = "time", "operations", "sent", "memory"
        columns = [list(column) for column in zip(*(row[:4] for row in rows), strict=True)]
        text = ", ".join(f"{a} {_text(b)}" for a, b in zip(labels, columns, strict=True))
        print(f"{name}: {len(rows)} layouts, {each:.2f} s each: {text}", flush=True)


if __name__ == "__main__":
    main()
