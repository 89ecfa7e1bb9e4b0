"""One layout of those that were found: a row of ``Choices``."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from penzai_shard.choosing.choices.cost_differences import (
    Comparison,
    CostDifference,
    seconds_text,
)
from penzai_shard.choosing.choices.layout_words import candidate_words
from penzai_shard.choosing.choices.priced_candidates import Priced, StageName
from penzai_shard.layouts import Layout
from penzai_shard.meshes import AnyMesh, make_mesh
from penzai_shard.report_trees import bytes_text
from penzai_shard.rule_kinds import OnIndivisible
from penzai_shard.training import TrainState, TrainStep
from penzai_shard.whole_files import refuse_unwritable, write_whole

PRICED_BY: dict[StageName, str] = {
    "names": "by names",
    "propagation": "by propagation",
    "compiled": "as compiled",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Choice:
    """A layout that was found, with its mesh, and with what a step costs in it.

    Attributes:
        priced: The candidate and its price.
        against: How it compares to the pick; of the pick itself what it pays most for.
        step_options: What a train step is to be given beside the layout: ``accumulate_steps``,
            and how plain arrays are split into microbatches.
        origin: What it was chosen from, in sentences.
        is_pick: Whether it is the best one.
    """

    priced: Priced
    against: Comparison = dataclasses.field(default_factory=Comparison)
    step_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origin: tuple[str, ...] = ()
    is_pick: bool = False

    @property
    def layout(self) -> Layout:
        """The layout, to be built, planned, or written to a file."""
        return self.priced.candidate.layout

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return dict(self.priced.candidate.mesh_axes)

    @property
    def microbatches(self) -> int:
        """In how many parts, one after the other, the batch is computed."""
        return self.priced.candidate.microbatches

    @property
    def on_indivisible(self) -> OnIndivisible:
        """``"pad"`` if it stores something padded, with which the layout is to be applied."""
        return self.priced.candidate.on_indivisible

    @property
    def seconds(self) -> float:
        """What a step takes at least in seconds; see ``StepTime``."""
        return self.priced.time.bound

    @property
    def memory(self) -> Mapping[str, float]:
        """What a device holds at once, in bytes, by what it is for."""
        return self.priced.cost.memory

    @property
    def memory_bytes(self) -> int:
        """All that a device holds at once."""
        return self.priced.memory

    @property
    def traffic_seconds(self) -> Mapping[str, float]:
        """What sending takes over each mesh axis, in seconds."""
        return self.priced.time.by_mesh_axis

    @property
    def pays(self) -> tuple[CostDifference, ...]:
        """What it pays more for than the pick, and then what less; see ``Comparison``."""
        return self.against.pays

    @property
    def priced_by(self) -> StageName:
        """``"compiled"``; ``"propagation"`` or ``"names"`` where nothing was compiled."""
        return self.priced.stage

    def mesh(
        self, devices: Sequence[jax.Device] | None = None, *, abstract: bool = False
    ) -> AnyMesh:
        """The mesh of this choice.

        Args:
            devices: As for ``make_mesh``.
            abstract: As for ``make_mesh``: whether it is one of devices that need not be there.

        Raises:
            MeshError: There are more devices or fewer.
        """
        if abstract:
            return make_mesh(self.mesh_shape, abstract=True)
        return make_mesh(self.mesh_shape, devices)

    def build(
        self,
        initializer: Callable[..., Any],
        *args: Any,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        rng: jax.Array,
        mesh: AnyMesh | None = None,
        **step_options: Any,
    ) -> tuple[TrainState, TrainStep]:
        """Builds the train state and its step as ``Layout.build`` does, with the microbatches.

        Args:
            initializer: As for ``Layout.build``.
            *args: Passed on to it.
            loss_fn: As for ``build_train_step_fn``.
            optimizer: An optax optimizer.
            rng: Random key of the whole run.
            mesh: The mesh; by default ``choice.mesh()``, of all devices.
            **step_options: As for ``Layout.build``.

        Raises:
            ShardingError: As ``Layout.build`` does.
        """
        return self.layout.build(
            initializer,
            *args,
            mesh=self.mesh() if mesh is None else mesh,
            loss_fn=loss_fn,
            optimizer=optimizer,
            rng=rng,
            **{"on_indivisible": self.on_indivisible, **self.step_options, **step_options},
        )

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes layout, mesh, microbatches and padding to a TOML file, the reasons as comments.

        ``Layout.from_toml`` reads the layout, ``Layout.read_toml`` all of it, and
        ``penzai-shard price MODEL --rules FILE`` prices a step in it.

        Args:
            path: The file, such as ``"rules.toml"``.

        Returns:
            The file.

        Raises:
            RuleTypeError: The path is that of a folder, or the layout cannot be written; see
                ``Layout.to_toml``.
        """
        refuse_unwritable(path, "path=", "rules.toml", "table of rules")
        return write_whole(path, self.to_toml())

    def to_toml(self) -> str:
        """The text that ``save`` writes."""
        held = ", ".join(f"{part} {bytes_text(size)}" for part, size in self.memory.items() if size)
        comments = [
            *self.origin,
            f"A step takes at least {seconds_text(self.seconds)}: {self._time_words()}.",
            f"A device holds {bytes_text(self.memory_bytes)}: {held}.",
            f"{self.pays_words()}.",
        ]
        written = self.layout.to_toml(
            self.mesh_shape, self.microbatches, on_indivisible=self.on_indivisible
        )
        return "".join(f"# {line}\n" for line in comments) + f"\n{written}"

    def words(self) -> str:
        """Mesh, microbatches and layout in words."""
        return candidate_words(self.priced.candidate)

    def _time_words(self) -> str:
        over = ", ".join(
            f"{seconds_text(seconds)} over {axis!r}"
            for axis, seconds in self.traffic_seconds.items()
            if seconds
        )
        sending = seconds_text(self.priced.time.traffic) + (f" ({over})" if over else "")
        computing = seconds_text(self.priced.time.compute)
        updating = seconds_text(self.priced.time.update)
        return (
            f"computing {computing}, sending {sending}, updating {updating}; "
            f"priced {PRICED_BY[self.priced_by]}"
        )

    def pays_words(self) -> str:
        """How it compares to the pick, in a line; of the pick what it pays most for."""
        if self.is_pick:
            paid = "; ".join(f"{seconds_text(one.seconds)} {one.text}" for one in self.pays)
            return f"It pays most for {paid}" if paid else "It pays for nothing that counts"
        paid = "; ".join(map(str, self.pays))
        said = ": ".join(filter(None, [self.against.words, paid]))
        return "; ".join(filter(None, [said, self.against.memory_words]))

    def __repr__(self) -> str:
        return (
            f"Choice({self.words()}; at least {seconds_text(self.seconds)}, "
            f"{bytes_text(self.memory_bytes)}, {PRICED_BY[self.priced_by]})"
        )
