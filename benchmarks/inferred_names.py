"""How many of the weights of models without names get those that their authors give, and how fast.

Each model's names are erased, inferred from its traced program alone, and compared with the names
of its author, which the inference never sees. Precision and recall are those of ties: pairs of
dimensions of weights that have one name, against pairs to which the author gives one. Seconds are
those of ``infer_names``, which traces the model; the median of the rounds.

    python -m benchmarks.inferred_names [--rounds 3] [--only llama]
"""

import argparse
import statistics
import time

import rich

from penzai_shard import infer_names
from penzai_shard.text_tables import PreparedTable
from tests.choosing.model_corpus import MODELS, TRANSFORMERS
from tests.choosing.name_oracle import compared, ties


class NamesTable(PreparedTable):
    """One row for each model."""

    headings = ("model", "weights", "precision", "recall", "fully named", "seconds")
    right_aligned = frozenset(headings[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--unlike", action="store_true", help="show what is named otherwise")
    options = parser.parse_args()
    rows, named, weights = [], 0, 0
    for title, build in MODELS.items():
        if options.only.lower() not in title.lower():
            continue
        model = build()
        seconds = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            found = infer_names(
                model.function, model.weights, *model.inputs, input_names=model.input_names
            )
            seconds.append(time.perf_counter() - start)
        labels = {path: names or (None,) * len(model.names[path]) for path, names in found.items()}
        judged = ties(labels, model.names)
        names = compared(labels, model.names, model.words)
        right = len(names.complete)
        if title in TRANSFORMERS:
            named, weights = named + right, weights + len(model.names)
        rows.append(
            (
                title,
                str(len(model.names)),
                f"{judged.precision:.3f}" if judged.right or judged.wrong else "no ties",
                f"{judged.recall:.3f}",
                f"{right}",
                f"{statistics.median(seconds):.2f}",
            )
        )
        if options.unlike:
            for path, (got, true) in names.incomplete.items():
                print(f"{title}: {path}: {got}, by its author {true}")
            for tie in judged.wrong:
                print(f"{title}: WRONG {tie}")
    verdict = f"{named} of {weights} weights of transformers fully named"
    verdict += f" ({named / weights:.1%})" if weights else ""
    rich.print(NamesTable(tuple(rows), verdict))


if __name__ == "__main__":
    main()
