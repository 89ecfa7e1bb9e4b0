"""The layout for a training step, found among all sane ones."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from penzai_shard.choosing.candidates import Candidate, candidates, mesh_shapes
from penzai_shard.choosing.candidates.enumerating import MICROBATCHES, POLICIES, OnUnfit
from penzai_shard.choosing.candidates.kept_axes import Keep
from penzai_shard.choosing.choices.asked_devices import AskedDevices, read_devices
from penzai_shard.choosing.choices.asked_problem import AskedProblem, read_problem
from penzai_shard.choosing.choices.asked_search import check_search
from penzai_shard.choosing.choices.choices import Choices
from penzai_shard.choosing.choices.garbage_collection import seldom_collected
from penzai_shard.choosing.choices.interruption import remembered_interruption
from penzai_shard.choosing.choices.priced_candidates import StageName
from penzai_shard.choosing.choices.search import Search, Stage
from penzai_shard.choosing.choices.search_progress import search_progress
from penzai_shard.choosing.choices.stages import stages_of
from penzai_shard.choosing.choices.what_would_help import nothing_fits
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.errors import PlanError
from penzai_shard.inspection.devices.absent_devices import compiler_of
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.layouts.model_roles import Names
from penzai_shard.meshes import AnyMesh

if TYPE_CHECKING:
    import optax

# How many candidates are priced by propagation, and how many compiled.
PROPAGATED = 200
COMPILED = 12
_ESTIMATED = "Memory as compiled for simulated devices is an estimate of what the hardware needs."


def choose_layout(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    *,
    devices: str | AnyMesh | int | Sequence[jax.Device],
    batch: int | Mapping[str, Any],
    seq: int | None = None,
    memory: float | str | None = None,
    keep: Keep | None = None,
    hardware: str | Hardware | None = None,
    names: Names | None = None,
    blocks: Any = None,
    rematerialise: Sequence[str | None] = POLICIES,
    microbatches: Sequence[int] = MICROBATCHES,
    on_indivisible: OnUnfit = "error",
    plain_arrays: bool = False,
    propagated: int = PROPAGATED,
    compiled: int = COMPILED,
    compile_for: Literal["simulated", "hardware"] = "simulated",
    progress: Any = None,
) -> Choices:
    """Finds how a model is best laid out over some devices for training.

    A layout is a short table from logical axes to mesh axes, so that all sane tables can be listed,
    on every shape of the mesh, with every policy of rematerialisation and number of microbatches.
    All are priced by the names of axes, from one trace of the step; the best by Shardy's
    propagation, from their programs; and the best of these are compiled for as many simulated
    devices. The price is the largest of the times to compute, to send and to update the optimizer's
    state, at the figures that the hardware's vendor publishes; one whose step needs more memory
    than there is, is never picked. Nothing runs, and no device is touched. The same question has
    the same answer on every machine.

    Listing shardings and pricing them is what Alpa does for tensors without names (Zheng et al.
    2022, arXiv:2201.12023); the price is that of a roofline (Williams et al. 2009).

    Args:
        model: The model, its arrays with values or abstract ones, with logical axis names:
            Penzai's, of Flax, or what ``name_axes`` gives. ``infer_names`` finds names for a model
            that has none.
        loss_fn: As for ``build_train_step_fn``.
        optimizer: An optax optimizer.
        devices: The name of hardware (``"v5e:32"``, ``"v5p:4x4x8"``, ``"h100:16"``), which leaves
            the mesh open, as does a number of devices, or ``jax.devices()``; or a mesh, which may
            be abstract, to be kept.
        batch: How many sequences a batch has: each input of the loss function that has no default
            is then tokens, ``batch`` x ``seq``. Or the inputs by name, arrays or structs; the first
            dimension of a plain array is the batch.
        seq: How many tokens a sequence has.
        memory: What a step may need of a device's memory, in bytes or as ``"16GiB"``; by default
            what programs can have of it.
        keep: What is decided: logical axis to mesh axis, to several, or to None for whole. For
            instance ``{"batch": "data"}``.
        hardware: What a mesh or a number is of: ``"v5e"``, or a ``Hardware`` of one's own.
            ``"cpu"`` are simulated devices as they are, which share the cores and the memory of one
            machine: what is best for them is not what is best for accelerators.
        names: As for ``Layout``: what the model calls its axes, where that is not found out.
        blocks: As for ``Layout``.
        rematerialise: Of the policies of ``Layout`` those to try.
        microbatches: The numbers of microbatches to try.
        on_indivisible: ``"error"`` leaves out what does not divide, which the notes list; with
            ``"pad"`` layouts are tried too that store parameters padded, and ``Choice.build``
            stores them so.
        plain_arrays: Whether a loss function gets plain arrays of a model that is not a module,
            such as a dictionary; as for ``TrainState.initial_state``.
        propagated: How many layouts are priced by propagation.
        compiled: How many of these are compiled; 0 for none. Of a deep model these are one and two
            blocks. All of them are compiled, which takes as much longer, of what would be picked
            and is too near to the limit for fewer to tell whether it fits.
        compile_for: For as many simulated devices, which takes seconds each; or for the
            ``"hardware"`` itself by its own compiler, for TPUs, which takes minutes.
        progress: None shows a bar for each stage in a terminal or a notebook, True lines elsewhere
            too, False nothing; or the ``rich.console.Console`` to show it on.

    Returns:
        The layouts, the best first. If Ctrl-C ends the search, the best so far.

    Raises:
        NothingFitsError: No layout fits into the memory; with the nearest, and what would help.
        PlanError: There is no sane layout.
        ShardingError: An argument cannot be read, or they do not go together.
        KeyboardInterrupt: Nothing that fits was found yet.

    >>> import jax, optax
    >>> from penzai import pz
    >>> from penzai_shard import abstract_model
    >>> def build():
    ...     axes = {"embedding": 512}, {"neurons": 2048}
    ...     return pz.nn.Linear.from_config("up", jax.random.key(0), *axes)
    >>> def loss_fn(model, rng, state, x):
    ...     return (model(x).untag("batch", "neurons") ** 2).mean().unwrap(), state, {}
    >>> x = {"x": pz.nx.ones({"batch": 4096, "embedding": 512})}
    >>> choices = choose_layout(
    ...     abstract_model(build),
    ...     loss_fn,
    ...     optax.sgd(0.1),
    ...     devices="v5e:8",
    ...     batch=x,
    ...     keep={"batch": "data"},
    ...     propagated=0,
    ...     compiled=0,
    ... )
    >>> choices.best.mesh_shape
    {'data': 2, 'model': 4}
    """
    check_search(keep, rematerialise, microbatches, propagated, compiled, on_indivisible, names)
    asked = read_problem(model, loss_fn, optimizer, batch, seq, plain_arrays, names)
    on = read_devices(devices, hardware, memory)
    topology = on.compiled_for(compile_for)
    if compiled and topology is not None:
        compiler_of(topology)  # Refused now, if it is not there, and not after the other stages.
    find = functools.partial(
        candidates,
        asked.problem,
        mesh_shapes=mesh_shapes(on.hardware) if on.mesh_shape is None else [on.mesh_shape],
        keep=keep,
        hardware=on.hardware,
        names=names,
        blocks=blocks,
        rematerialise=rematerialise,
        microbatches=microbatches,
        on_indivisible=on_indivisible,
    )
    found = find()
    restricted_by = _restrictions(
        on, keep or {}, rematerialise, microbatches, None if found else find
    )
    notes = [f"Left out: {reason}." for reason in found.left_out]
    choices = searched(
        asked,
        on,
        found,
        stages_of(
            asked.problem,
            with_propagation=propagated > 0,
            with_compiling=compiled > 0,
            topology=topology,
            notes=notes,
        ),
        most={"propagation": propagated, "compiled": compiled},
        restricted_by=restricted_by,
        progress=progress,
        notes=notes,
        could_be_padded=found.could_be_padded,
    )
    if compile_for == "hardware" or choices.best.priced_by != "compiled":
        return choices
    return dataclasses.replace(choices, notes=(_ESTIMATED, *choices.notes))


def _restrictions(
    on: AskedDevices,
    keep: Keep,
    rematerialise: Sequence[str | None],
    microbatches: Sequence[int],
    find: Callable[..., Sequence[Candidate]] | None,
) -> list[str]:
    """The arguments by which there are fewer candidates.

    Args:
        on: The devices.
        keep: What is kept.
        rematerialise: The policies that are tried.
        microbatches: The numbers of microbatches that are tried.
        find: Finds candidates, if with all of these there are none; only those are told without
            which there are some, and of what is kept such pairs alone.
    """
    without: dict[str, dict[str, Any]] = {}
    for name in keep:
        others = {other: each for other, each in keep.items() if other != name}
        without[f"keep={ {name: keep[name]}!r}"] = {"keep": others}
    if keep and (find is None or not any(find(**given) for given in without.values())):
        without = {f"keep={dict(keep)!r}": {"keep": None}}
    if on.mesh_shape is not None:
        without["the mesh, devices="] = {"mesh_shapes": mesh_shapes(on.hardware)}
    if tuple(rematerialise) != POLICIES:
        without["rematerialise="] = {"rematerialise": POLICIES}
    if tuple(microbatches) != MICROBATCHES:
        without["microbatches="] = {"microbatches": MICROBATCHES}
    return [text for text, given in without.items() if find is None or find(**given)]


def searched(
    problem: AskedProblem,
    devices: AskedDevices,
    some: Sequence[Candidate],
    stages: Sequence[Stage],
    *,
    most: Mapping[StageName, int],
    restricted_by: Sequence[str] = (),
    progress: Any = None,
    notes: Sequence[str] = (),
    could_be_padded: int = 0,
) -> Choices:
    """The choices among some candidates.

    Args:
        problem: The training step.
        devices: The devices.
        some: The candidates.
        stages: The ways to price them, from the quickest to the most exact one.
        most: How many candidates each stage but the first prices.
        restricted_by: The arguments by which there are fewer candidates; where there are none, by
            each of which alone.
        progress: As for ``byte_progress``.
        notes: What else there is to know, in sentences.
        could_be_padded: How many tables are left out that ``on_indivisible="pad"`` would try.

    Raises:
        NothingFitsError: No candidate fits into the memory.
        PlanError: There is no candidate, or none that can be laid out.
        KeyboardInterrupt: Nothing that fits was found before Ctrl-C.
    """
    asked = f"{problem.words} on {devices.words}"
    if not some:
        fix = f" Leave out {' or '.join(restricted_by)}." if restricted_by else ""
        if could_be_padded:
            fix += ' Storing padded what does not divide gives some: on_indivisible="pad".'
        raise PlanError(f"there is no sane layout for {asked}.{fix}", notes)

    def time_of(candidate: Candidate, cost: StepCost) -> StepTime:
        return StepTime.of(cost, candidate.mesh_shape, devices.hardware)

    with (
        seldom_collected(),
        search_progress(progress) as show,
        remembered_interruption() as check,
    ):

        def watch(stage: StageName, done: int, total: int) -> None:
            show(stage, done, total)
            check()

        search = Search(devices.memory, time_of, dict(most), watch)
        found = search.run(some, stages)
    if found.refusals:
        raise PlanError(f"none of the layouts for {asked} can be laid out:", found.refusals)
    if not found.ranked(devices.memory):
        if found.is_interrupted:
            # That nothing fits can be said of a whole search alone.
            raise KeyboardInterrupt
        batch = problem.sizes.get(problem.problem.batch_axis)
        count = len(found.all_priced())
        raise nothing_fits(
            found.last_priced(),
            count,
            devices.memory,
            batch,
            restricted_by,
            could_be_padded,
            found.in_doubt,
        )
    return Choices(
        found, devices.hardware, devices.memory, asked, problem.step_options, tuple(notes)
    )
