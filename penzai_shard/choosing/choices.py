"""Holds the layouts that were found with their prices; says why, and builds steps in them."""

import dataclasses
import functools
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.cost import StepCost
from penzai_shard.choosing.hardware import Hardware, StepTime, step_time
from penzai_shard.choosing.search import Price
from penzai_shard.layouts.layout import Layout
from penzai_shard.meshes import AnyMesh, make_mesh
from penzai_shard.reports.quantities import bytes_text, seconds_text
from penzai_shard.reports.report import Column, HasReport, Report
from penzai_shard.training.train_state import TrainState

_SENT = {
    "parameter": "gathering parameters",
    "gradient": "reducing gradients",
    "optimizer": "moving the optimizer's state",
    "activation": "moving activations",
    "": "sending",
}
# A smaller part of a step is not worth a word.
_SMALL = 0.005
_MORE_SHOWN = 3


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """A layout on a mesh, with what a step costs in it.

    Attributes:
        candidate: The layout, the mesh and the microbatches.
        cost: What a step costs one device.
        hardware: The devices.
        priced_by: ``"compiled"``, ``"compiled (1 and 2 of 80 blocks)"``, or ``"estimated"``.
        step_options: What the step is built with besides.
    """

    candidate: Candidate
    cost: StepCost
    hardware: Hardware
    priced_by: str
    step_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.candidate.layout

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return dict(self.candidate.mesh_sizes)

    @property
    def microbatches(self) -> int:
        """In how many parts, one after the other, a batch is computed."""
        return self.candidate.microbatches

    @functools.cached_property
    def time(self) -> StepTime:
        """What a step takes time for."""
        return step_time(self.cost, self.mesh_sizes, self.hardware)

    @property
    def seconds(self) -> float:
        """How long a step takes at least."""
        return self.time.bound

    @property
    def memory(self) -> Mapping[str, float]:
        """The bytes that a device holds, by what they are for."""
        return self.cost.memory

    @property
    def memory_bytes(self) -> int:
        """All that a device holds."""
        return self.cost.memory_bytes

    @property
    def memory_text(self) -> str:
        """What a device holds, for people."""
        return ", ".join(f"{bytes_text(n)} of {part}" for part, n in self.memory.items() if n)

    @property
    def price(self) -> Price:
        """What the search compares; sums in another order are still equal."""
        figures = self.seconds, self.time.total, self.memory_bytes
        return Price(*(float(f"{figure:.9g}") for figure in figures))

    @functools.cached_property
    def spending(self) -> dict[str, float]:
        """The seconds for each thing that a step does, as if it did one after the other."""
        spent = {"computing": self.time.compute, "updating the optimizer": self.time.update}
        for (what, mesh_axes), count in self.cost.sent.items():
            alone = StepCost(0.0, {(what, mesh_axes): count}, {})
            text = f"{_SENT[what]} over {' and '.join(mesh_axes)}"
            spent[text] = step_time(alone, self.mesh_sizes, self.hardware).send
        return spent

    def pays(self, pick: "Choice") -> list[tuple[str, float]]:
        """What takes longer than in the pick, and by how many seconds.

        The three that matter most, then what it saves most, less than 0.
        """
        keys = {**self.spending, **pick.spending}
        more = [(key, self.spending.get(key, 0.0) - pick.spending.get(key, 0.0)) for key in keys]
        more = [pair for pair in more if abs(pair[1]) > _SMALL * pick.seconds]
        more.sort(key=lambda pair: (-pair[1], pair[0]))
        paid = [pair for pair in more if pair[1] > 0][:_MORE_SHOWN]
        return paid + [pair for pair in more[-1:] if pair[1] < 0]

    def mesh(self) -> AnyMesh:
        """The mesh, over all devices; ``make_mesh(choice.mesh_sizes, ...)`` lays others.

        Raises:
            MeshError: There are more devices, or fewer.
        """
        return make_mesh(self.mesh_sizes)

    def build(
        self,
        initializer: Callable[..., Any],
        *args: Any,
        mesh: AnyMesh | None = None,
        **options: Any,
    ) -> tuple[TrainState, Any]:
        """Builds the train state and its step with the microbatches, as ``Layout.build`` does.

        Args:
            initializer: A function that returns the model.
            *args: Its arguments.
            mesh: The mesh; by default ``choice.mesh()``.
            **options: ``loss_fn``, ``optimizer`` and ``rng``, and the others of ``Layout.build``.

        Raises:
            PlanError, MeshError, RuleTypeError: As ``Layout.build``.
        """
        options = {"accumulate_steps": self.microbatches, **self.step_options, **options}
        mesh = self.mesh() if mesh is None else mesh
        return self.layout.build(initializer, *args, mesh=mesh, **options)

    def to_toml(self) -> str:
        """Layout, mesh and microbatches as the text of a file; ``Layout.read_toml`` reads it.

        Raises:
            RuleTypeError: The layout cannot be written; see ``Layout.to_toml``.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "layout.toml")
            sizes, parts = self.mesh_sizes, self.microbatches
            self.layout.to_toml(file, mesh_shape=sizes, microbatches=parts)
            return f"# {self}\n{file.read_text('utf-8')}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``to_toml()`` to a file.

        Raises:
            RuleTypeError: The layout cannot be written; see ``Layout.to_toml``.
        """
        pathlib.Path(path).write_text(self.to_toml(), encoding="utf-8")

    def __repr__(self) -> str:
        held = bytes_text(self.memory_bytes)
        step = f"at least {seconds_text(self.seconds)} a step, {held}, {self.priced_by}"
        return f"{self.candidate.words}; {step}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Choices(HasReport, Sequence[Choice]):
    """The layouts of which compiled steps fit, the best first.

    Attributes:
        choices: The layouts.
        priced: All that were priced, compiled or estimated, those that do not fit too.
        question: What they are for: the inputs and the devices.
        memory_limit: The bytes that a step may need on a device.
        free: The part of these that stays free, as memory that follows from few blocks may err.
        considered: How many layouts there are whose parameters and optimizer can be stored.
        gap: By which part the pick is slower than the best of these at most, by these costs;
            infinite where nothing bounds it.
        interrupted: Whether Ctrl-C ended the search.
        notes: What else is to be known.
    """

    choices: tuple[Choice, ...]
    priced: tuple[Choice, ...]
    question: str
    memory_limit: int
    free: float
    considered: int
    gap: float
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Choice:
        """The pick."""
        return self.choices[0]

    def __getitem__(self, index: Any) -> Any:
        return self.choices[index]

    def __len__(self) -> int:
        return len(self.choices)

    def report(self) -> Report:
        """A row for each layout that fits, the best first, with what it pays more for than it."""
        best, axes = self.best, dict.fromkeys(axis for each in self for axis in each.mesh_sizes)
        columns = [Column("layout"), *(Column(name, "seconds") for name in ("step", "computing"))]
        columns += [Column(f"over {axis}", "seconds") for axis in axes]
        columns += [Column("updating", "seconds"), Column("memory", "bytes"), Column("priced")]
        columns += [Column("pays more for", "detail")]
        rows = []
        for each in self:
            time, over = each.time, [each.time.by_mesh_axis.get(axis) for axis in axes]
            more = (
                f"{seconds_text(abs(n))} {'more' if n > 0 else 'less'} {x}"
                for x, n in each.pays(best)
            )
            pays = "; ".join(more) or None
            figures = time.bound, time.compute, *over, time.update, each.memory_bytes
            rows.append((each.candidate.words, *figures, each.priced_by, pays))
        how = "the best so far (interrupted)" if self.interrupted else "the best"
        step = f"{best.candidate.words}; at least {seconds_text(best.seconds)} a step"
        held = f"{bytes_text(best.memory_bytes)} of {bytes_text(self.memory_limit)}"
        layouts = f"{how} of {self.considered:,} layouts for {self.question}"
        verdict = f"{layouts}: {step}, {held}, {best.priced_by}"
        facts = {"mesh": best.mesh_sizes, "microbatches": best.microbatches, "gap": self.gap}
        notes = [*self._explain(), *self.notes]
        return Report("Choices", verdict, columns, rows, notes, facts=facts)

    def _explain(self) -> Iterator[str]:
        """Why the best is the pick, how sure that is, and what would change it."""
        best = self.best
        traffic = best.cost.traffic.items()
        sent = [f"{bytes_text(n)} over {' and '.join(axes)}" for axes, n in traffic if n]
        yield f"A device holds {best.memory_text}; it sends {', '.join(sent) or 'nothing'}."
        layouts = f"by these costs, than any of {self.considered:,} layouts"
        if self.gap < math.inf:
            yield f"At most {math.ceil(100 * self.gap)} % slower, {layouts}."

        larger = [x for x in self.priced if x.memory_bytes > (1 - self.free) * self.memory_limit]
        quicker = [each for each in larger if each.seconds < (1 - _SMALL) * best.seconds]
        time = best.time
        if quicker:
            near = min(quicker, key=lambda each: (each.memory_bytes, each.candidate.words))
            lacks = bytes_text(near.memory_bytes / (1 - self.free) - self.memory_limit)
            word = "this may" if near.priced_by == "estimated" else "this would"
            free = f", so that {100 * self.free:.0f} % stay free" if self.free else ""
            yield f"Memory limits: with {lacks} more on each device{free}, {word} fit: {near!r}."
        elif time.send > max(time.compute, time.update):
            axis = max(time.by_mesh_axis, key=lambda axis: time.by_mesh_axis[axis])
            over = [x for x in best.cost.sent if axis in x[1]]
            what, _ = max(over, key=lambda x: best.cost.sent[x])
            yield f"Sending over {axis!r} limits the step, mostly {_SENT[what]}."
        else:
            what = "Computing" if time.compute >= time.update else "Updating the optimizer"
            yield f"{what} limits the step: more memory, or less to send, would change nothing."
