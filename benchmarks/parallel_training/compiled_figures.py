"""What a compiled step says about itself: figures that no other load on a machine touches."""

import dataclasses
import re
from typing import Any

from benchmarks.compiled_collectives import Collective, bytes_moved, read_collectives


@dataclasses.dataclass(frozen=True)
class CompiledFigures:
    """Figures of a compiled step, all per device.

    Attributes:
        flops: Floating-point operations.
        bytes_accessed: Bytes that its operations read and write.
        temporaries: Bytes of temporary memory.
        collectives: Its collectives.
        transposes: How many transposes its text has.
        copies: How many copies.
    """

    flops: float
    bytes_accessed: float
    temporaries: int
    collectives: list[Collective]
    transposes: int
    copies: int

    @property
    def bytes_sent(self) -> float:
        """What a device sends in one step."""
        return bytes_moved(self.collectives)

    def ratios_to(self, base: "CompiledFigures") -> dict[str, float]:
        """Each figure as a ratio to another program's, by its name in tables."""
        return {
            "flops": self.flops / base.flops,
            "bytes accessed": self.bytes_accessed / base.bytes_accessed,
            "temporaries": self.temporaries / base.temporaries,
            "bytes sent": self.bytes_sent / base.bytes_sent,
        }

    def collectives_text(self) -> str:
        """The collectives by kind: how many, and the sizes of their arrays in MB."""
        kinds: dict[str, list[int]] = {}
        for one in self.collectives:
            kinds.setdefault(one.kind, []).append(one.payload_bytes)
        return ", ".join(
            f"{len(sizes)} {kind} ({sum(sizes) / 1e6:.2f} MB)" for kind, sizes in kinds.items()
        )

    @classmethod
    def of(cls, compiled: Any, mesh: Any) -> "CompiledFigures":
        """The figures of a compiled program."""
        text = compiled.as_text()
        cost = compiled.cost_analysis()
        return cls(
            flops=cost["flops"],
            bytes_accessed=cost["bytes accessed"],
            temporaries=compiled.memory_analysis().temp_size_in_bytes,
            collectives=read_collectives(text, mesh),
            transposes=len(re.findall(r" transpose\(", text)),
            copies=len(re.findall(r" copy\(", text)),
        )
