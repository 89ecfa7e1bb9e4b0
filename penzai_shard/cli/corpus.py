"""Text that every Python carries, as bytes for a byte-level model."""

import dataclasses
import pydoc_data.topics
from collections.abc import Iterator

import numpy as np
from penzai import pz


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Python's own help pages as bytes, the end of them held out.

    Attributes:
        training: The bytes to train on, ``uint8``.
        held_out: The bytes to evaluate on, ``uint8``.
    """

    training: np.ndarray
    held_out: np.ndarray

    @classmethod
    def help_pages(cls, held_out_share: float = 0.05) -> "Corpus":
        """Reads the help pages in the order of their names."""
        topics = pydoc_data.topics.topics
        text = "\n\n".join(topics[name] for name in sorted(topics))
        data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        trained_on = int(len(data) * (1 - held_out_share))
        return cls(data[:trained_on], data[trained_on:])

    def unigram_entropy(self) -> float:
        """Entropy of single bytes, in nats: what a model reaches that ignores all context."""
        counts = np.bincount(self.training, minlength=256)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    def batches(self, seed: int, batch_size: int, length: int) -> Iterator[pz.nx.NamedArray]:
        """Endless random pieces of the training text, named ``batch`` and ``seq``.

        Args:
            seed: Seed of the choice.
            batch_size: Pieces per batch.
            length: Bytes per piece, including the one that is only predicted.
        """
        random = np.random.default_rng(seed)
        while True:
            starts = random.integers(0, len(self.training) - length, batch_size)
            yield _pieces(self.training, starts, length)

    def held_out_batch(self, batch_size: int, length: int) -> pz.nx.NamedArray:
        """One fixed batch of held-out text, evenly spread over it."""
        starts = np.linspace(0, len(self.held_out) - length, batch_size).astype(int)
        return _pieces(self.held_out, starts, length)

    def prompt(self, length: int) -> bytes:
        """Held-out text that ends where a sentence has just begun, with ``The``."""
        end = bytes(self.held_out).index(b" The ", length) + len(b" The ")
        return bytes(self.held_out[end - length : end])


def _pieces(data: np.ndarray, starts: np.ndarray, length: int) -> pz.nx.NamedArray:
    pieces = np.stack([data[start : start + length] for start in starts]).astype(np.int32)
    return pz.nx.wrap(pieces, "batch", "seq")
