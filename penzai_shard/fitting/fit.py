"""``fit``: a training loop in one call."""

import contextlib
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from penzai_shard import errors
from penzai_shard.arrays.inputs import bound_sharding
from penzai_shard.arrays.kinds import is_struct
from penzai_shard.checkpoints.manager import CheckpointManager
from penzai_shard.fitting.batch_feed import BatchFeed, Position, can_begin_anew, make_batches
from penzai_shard.fitting.loop import (
    LogRecord,
    TrainingLoop,
    agree_to_stop,
    evaluate,
    stop_requests,
)
from penzai_shard.meshes import AnyMesh
from penzai_shard.processes.agreement import on_first
from penzai_shard.progress import progress as draw_progress
from penzai_shard.training.batches import shard_batch as place_batch
from penzai_shard.training.train_state import TrainState

_COUNTS = "steps", "prefetch", "log_every", "save_every", "keep", "keep_every", "evaluate_every"
_ANEW = "batches=lambda: itertools.cycle(data), which a run that goes on calls anew"
_Batches = Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]


def fit(
    state: TrainState,
    step: Callable[..., tuple[TrainState, Any]],
    batches: _Batches,
    *,
    steps: int | None,
    shard_batch: Callable[[Any], Any] | None = None,
    mesh: AnyMesh | None = None,
    rules: Any = None,
    first_axis: Hashable | None = None,
    prefetch: int = 2,
    log_every: int | None = 10,
    on_log: Callable[[LogRecord], Any] | None = None,
    progress: bool = True,
    loss: str | None = "loss",
    allow_nonfinite: bool = False,
    tokens_axes: Sequence[Hashable] = ("batch", "seq"),
    checkpoint: Any = None,
    save_every: int | None = None,
    keep: int | None = 2,
    keep_every: int | None = None,
    best: Any = None,
    resume: bool = True,
    evaluate_every: int | None = None,
    eval_step: Callable[..., Any] | None = None,
    eval_batches: _Batches | None = None,
    stop_event: Any = None,
    on_stop: Literal["raise", "return"] = "raise",
) -> TrainState:
    """Trains: one step after the other, with progress, checkpoints, and batches placed ahead.

    **Steps.** A step is given to the devices before the results of the one before are read, and a
    thread places the batches of the next ones meanwhile. If the step donates, as it should, the
    state that was passed in is used up; keep the one that is returned.

    **Resuming.** With ``checkpoint`` the run can be killed at any moment. The same call goes on
    from the newest checkpoint, with the losses of a run that was never stopped, bit for bit. An
    iterator with ``get_state()`` and ``set_state(state)``, as those of grain, is put where it was.
    Of an iterable, of what a function gives, and of a new generator the batches that were used are
    drawn and dropped, so they must come in the same order again. Other iterators are refused where
    there is a ``checkpoint``: they do not say how many batches they have given. A checkpoint is
    read into the layout of ``state``. What the step donates of ``state`` is freed before, once the
    checkpoint is found to fit.

    **Stopping.** On Ctrl-C, or the SIGTERM that clusters send, the step under way is finished and
    the state saved. Then ``KeyboardInterrupt`` or ``SystemExit`` is raised, with the state as its
    attribute ``state``. A second Ctrl-C ends at once, but for a checkpoint that is being written.
    Of several processes all stop after the same step. Signals reach only the main
    thread: elsewhere, set ``stop_event``.

    Args:
        state: The train state to start from.
        step: ``step(state, **batch) -> (state, report)``, as ``build_train_step_fn`` gives it.
        batches: An iterable of dictionaries of the loss function's inputs, or a function without
            arguments that gives one.
        steps: The number of the last step: the run ends when ``state.step`` is this, also when it
            was resumed. None goes on until the batches end.
        shard_batch: Places a batch, for instance
            ``functools.partial(layout.shard_batch, mesh=mesh)``; with ``local=True`` where each of
            several processes draws its own rows.
        mesh: Or else the mesh to place batches on.
        rules: With ``mesh``, as for ``shard_batch``.
        first_axis: With ``mesh``, as for ``shard_batch``.
        prefetch: How many batches to place ahead of their use.
        log_every: After how many steps to make a record. There is one of each step too after which
            the state is evaluated or saved.
        on_log: Called with each ``LogRecord``, in every process.
        progress: Whether to show how far the run is: a bar in a terminal, elsewhere lines at
            intervals.
        loss: The key of the loss in the report; None if it has none. A report that is a single
            number is the loss.
        allow_nonfinite: Whether to go on when the loss is infinite or not a number.
        tokens_axes: The logical axes of which the lengths, multiplied, count the tokens of a batch.
        checkpoint: The folder of a ``CheckpointManager``, which several processes share.
        save_every: After how many steps to save. The last step is saved anyway.
        keep: How many of the newest checkpoints to keep; None keeps all.
        keep_every: Checkpoints whose step is a multiple of this are kept too.
        best: As for ``CheckpointManager``. The metrics are the single numbers that the step
            reports, the ``"loss"``, and those of the evaluation, such as ``"evaluation/loss"``: let
            ``save_every`` be a multiple of ``evaluate_every`` then.
        resume: Whether to go on from the newest checkpoint. If not, there must not be any.
        evaluate_every: After how many steps, and after the last one, to evaluate.
        eval_step: ``eval_step(state, **batch)``, as ``build_eval_step_fn`` gives it, or anything
            else that gives a tree of numbers.
        eval_batches: Its batches, read anew each time. What it returns is averaged, each batch
            counting the same.
        stop_event: A ``threading.Event`` or the like: when it is set, the run ends after the step
            under way, is saved, and the state returned.
        on_stop: After a signal, ``"raise"`` or ``"return"``.

    Returns:
        The state after the last step.

    Raises:
        NonFiniteLossError: The loss is infinite or not a number; names the step.
        TrainingStoppedError: The batches ended early, or the folder is of another run. As all
            errors that end the steps it has the last ``state``.
        RuleTypeError: Arguments or batches cannot be read.
        CheckpointWriteError: The state cannot be saved.
        OSError: The folder cannot be made.
        Exception: What the iterator of batches raised; the state is saved before.

    >>> import optax, jax.numpy as jnp
    >>> import penzai_shard as pzs
    >>> def loss_fn(model, rng, state, x):
    ...     return jnp.sum((model["w"] - x) ** 2), state, {}
    >>> step = pzs.build_train_step_fn(loss_fn, step_metrics=["loss"])
    >>> state = TrainState.initial_state({"w": jnp.zeros(3)}, optax.sgd(0.25), jax.random.key(0))
    >>> losses = []
    >>> state = fit(
    ...     state,
    ...     step,
    ...     [{"x": jnp.ones(3)}] * 3,
    ...     steps=3,
    ...     log_every=1,
    ...     on_log=lambda record: losses.append(record.loss),
    ...     progress=False,
    ... )
    >>> losses
    [3.0, 0.75, 0.1875]
    """
    given = locals()
    _check(given)
    given.clear()  # Before Python 3.13 it would keep the state in memory.
    place = shard_batch or (lambda batch: batch)
    if mesh is not None:
        place = functools.partial(place_batch, mesh=mesh, rules=rules, first_axis=first_axis)
    draw = functools.partial(make_batches, place=place, tokens_axes=tokens_axes)
    manager = evaluating = None
    if checkpoint is not None:
        manager = CheckpointManager(checkpoint, keep_last=keep, keep_every=keep_every, best=best)
    if eval_step is not None:
        draw_all = functools.partial(draw, "eval_batches", eval_batches, Position())
        evaluating = functools.partial(evaluate, eval_step, draw_all, prefetch)

    # Before there is a bar: the one of the restore would be drawn into it.
    state, position, saved = _find_start(state, step, manager, steps, resume, progress)
    with draw_progress(steps, "steps", progress and jax.process_index() == 0) as bar:
        when = steps, log_every, save_every, evaluate_every
        others: Any = on_log, loss, allow_nonfinite, manager, best, evaluating
        loop = TrainingLoop(step, state, position, saved, bar, *when, *others)
        del state  # Of a run that goes on, all that was restored would stay in memory.
        items = draw("batches", batches, position, most=steps and steps - loop.done)
        try:
            stops, feed = stop_requests(stop_event), BatchFeed(items, prefetch)
            with stops as find_reason, manager or contextlib.nullcontext(), feed:
                loop.run(feed, find_reason)
            if reason := agree_to_stop(find_reason):
                loop.end_early(reason, on_stop)
        except BaseException as error:
            # Not every class of errors takes an attribute.
            with contextlib.suppress(AttributeError, TypeError):
                error.state = getattr(error, "state", None) or loop.state  # type: ignore[attr-defined]
            raise
    return loop.state


def _check(given: Mapping[str, Any]) -> None:
    """Refuses arguments of ``fit`` that are wrong, or do not go together."""
    absent = {name for name, value in given.items() if value is None} - {"step", "prefetch"}
    evaluation = {"evaluate_every", "eval_step", "eval_batches"}
    is_whole = evaluation <= absent or not evaluation & absent
    is_whole &= not isinstance(given["eval_batches"], Iterator)
    is_placing = bool({"shard_batch", "mesh"} & absent)
    is_placing &= "mesh" not in absent or {"rules", "first_axis"} <= absent
    is_state = isinstance(given["state"], TrainState) and not is_struct(given["state"].step)
    is_saving = "checkpoint" not in absent or {"save_every", "keep_every", "best"} <= absent
    rightness = {
        "state": (is_state, "state=TrainState.initial_state(model, optimizer, rng)"),
        "batches": ("checkpoint" in absent or can_begin_anew(given["batches"]), _ANEW),
        "tokens_axes": (not isinstance(given["tokens_axes"], str), "tokens_axes=('batch', 'seq')"),
        "on_stop": (given["on_stop"] in ("raise", "return"), "on_stop='return'"),
        "mesh": (is_placing, "shard_batch=function, or mesh=mesh with rules and first_axis"),
        "eval_batches": (is_whole, "evaluate_every=100, eval_step=step, eval_batches=[batch]"),
        "checkpoint": (is_saving, "checkpoint='run' with save_every, keep_every and best"),
    }
    for name in ("shard_batch", "on_log"):
        rightness[name] = name in absent or callable(given[name]), f"{name}=function"
    for name, build in (("step", "build_train_step_fn"), ("eval_step", "build_eval_step_fn")):
        is_step = name in absent or callable(given[name])
        rightness[name] = is_step, f"{name}={build}(loss_fn)"
    for name in _COUNTS:
        is_count = type(given[name]) is int and given[name] > 0
        rightness[name] = name in absent or is_count, f"{name}=1 or more"
    checks = {name: (given[name], *right) for name, right in rightness.items()}
    errors.check_arguments("fit", checks)


def _find_start(
    state: TrainState, step: Any, manager: Any, steps: int | None, resume: bool, progress: bool
) -> tuple[TrainState, Position, int | None]:
    """The state to start from, its place in the batches, and the step of its checkpoint."""
    given, what, fix = int(state.step), "", "Choose another folder."
    newest = manager and on_first("looking for a checkpoint", lambda: manager.latest)
    reached, where, extra = given, "state", {}
    if newest is not None:
        reached, where, extra = newest, manager.path_of(newest), manager.extra(newest)
        if not resume:
            what = "it is there, and resume=False"
        elif newest < given:
            what = f"it is of step {newest}, and the state is at step {given}"
        elif "batches" not in extra:
            what = "it does not say how many batches its run has used"
    # A run that is called again once all is done gives its last state.
    if not what and steps is not None and reached >= steps and newest != steps:
        what = f"it is at step {reached}, and the last step is {steps}"
        fix = f"Write steps={reached + steps}, the number of steps in all."
    if what:
        raise errors.TrainingStoppedError("fit cannot start:", [errors.Problem(where, what, fix)])

    if newest is None:
        if manager is not None:
            # First: where nothing can be saved, nothing is trained.
            on_first("making a folder", lambda: os.makedirs(manager.path, exist_ok=True))
        return state, Position(), None
    is_free = not any(map(bound_sharding, jax.tree.leaves(state)))
    free = state.arguments()[0] if getattr(step, "is_donating", False) else ()
    options = {"free": free, "progress": None if progress else False}
    state, position = manager.restore(state, newest, **options), Position(**extra["batches"])
    if is_free:
        # By way of the host, so that it goes where the batches are, as before it was saved.
        state = jax.tree.map(jnp.array, jax.device_get(state))
    return state, position, newest
