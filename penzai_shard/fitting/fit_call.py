"""``fit``: a training loop in one call."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from penzai_shard.array_kinds import is_abstract
from penzai_shard.checkpointing.locations import PathLike
from penzai_shard.checkpointing.retention import Best
from penzai_shard.errors import RuleTypeError, TrainingStoppedError
from penzai_shard.fitting.batch_sources import (
    BatchSource,
    Place,
    Position,
    token_count,
)
from penzai_shard.fitting.evaluation import Evaluation
from penzai_shard.fitting.log_records import EVALUATION, LogRecord, LossOf
from penzai_shard.fitting.loop import LoopOptions, TrainingLoop
from penzai_shard.fitting.progress_display import ProgressDisplay, progress_display
from penzai_shard.fitting.run_folder import RunFolder
from penzai_shard.fitting.stop_requests import StopEvent, StopReason
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_leaves import LogicalAxis
from penzai_shard.training import TrainState
from penzai_shard.training import shard_batch as place_batch
from penzai_shard.training.train_state import peek
from penzai_shard.training.update_guards import SKIPPED

# A run whose step skips what is not finite ends after so many such losses in a row.
MOST_SKIPPED = 100

OnStop = Literal["raise", "return"]


def fit(
    state: TrainState,
    step: Callable[..., tuple[TrainState, Any]],
    batches: Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]],
    *,
    steps: int | None,
    shard_batch: Place | None = None,
    mesh: AnyMesh | None = None,
    rules: Any = None,
    first_axis: LogicalAxis | None = None,
    prefetch: int = 2,
    log_every: int = 10,
    on_log: Callable[[LogRecord], Any] | None = None,
    progress: Any = True,
    loss: LossOf = "loss",
    allow_nonfinite: bool | None = None,
    tokens_axes: Sequence[LogicalAxis] = ("batch", "seq"),
    checkpoint: PathLike | None = None,
    save_every: int | None = None,
    keep: int | None = 2,
    keep_every: int | None = None,
    best: Any = None,
    resume: bool = True,
    evaluate_every: int | None = None,
    eval_step: Callable[..., Any] | None = None,
    eval_batches: Any = None,
    stop_event: StopEvent | None = None,
    on_stop: OnStop = "raise",
) -> TrainState:
    """Trains: one step after the other, with progress, checkpoints, and batches placed ahead.

    **Steps.** A step is given to the devices before the results of the one before are read, and
    the batches of the next ones are placed by a thread meanwhile. If the step donates, as it
    should, the state that was passed in is used up; keep the one that is returned.

    **Resuming.** With ``checkpoint`` the run can be killed at any moment. Called again with the
    same arguments, it goes on from the newest checkpoint, and its losses are equal bit for bit to
    those of a run that was never stopped. A dataset or an iterator of grain, or anything else whose
    iterator has ``get_state()`` and ``set_state(state)``, is put where it was; of all others, as
    many batches are drawn and dropped as steps have used them, so they must come in the same order
    again. What was placed ahead and not used does not count. A checkpoint is read into the layout
    of ``state``, whose own memory is freed before if the step donates.

    **Stopping.** On Ctrl-C, or the SIGTERM that clusters send, the step under way is finished and
    the state saved, if there is a place for it. Then ``KeyboardInterrupt`` is raised, or
    ``SystemExit``, so that a script does not go on as if it were done; its attribute ``state`` is
    the state. In a notebook ``on_stop="return"`` returns the state instead. A second Ctrl-C ends
    at once. Of several processes all stop after the same step. Signals reach the main thread alone:
    elsewhere, set ``stop_event``.

    Args:
        state: The train state to start from.
        step: ``step(state, **batch) -> (state, aux)``, as ``build_train_step_fn`` gives it.
        batches: The batches: a list, a generator, a dataset, any other iterable or iterator, or a
            function without arguments that gives one. A batch is a dictionary of the loss
            function's inputs by name.
        steps: The number of the last step: the run ends when ``state.step`` is this, also if it
            is resumed. None goes on until the batches end.
        shard_batch: Places a batch, for instance
            ``functools.partial(layout.shard_batch, mesh=mesh)``; with ``local=True`` where each of
            several processes draws its own rows.
        mesh: Or else the mesh to place batches on.
        rules: With ``mesh``, which logical axis goes to which mesh axis.
        first_axis: With ``mesh``, what the first dimension of plain arrays is, such as ``"batch"``.
        prefetch: How many batches to place ahead of their use. 0 draws and places each when it is
            needed, without a thread.
        log_every: After how many steps to make a record; there is one of the last step too.
        on_log: Called with each ``LogRecord``, in every process.
        progress: Whether to show how far the run is: a bar in a terminal and in a notebook, lines
            at intervals elsewhere. Or the ``rich.console.Console`` to show it on.
        loss: Where the loss is in ``aux``: a key, or a function of ``aux``; None if it has none.
            An ``aux`` that is a single number is the loss.
        allow_nonfinite: Whether to go on when the loss is infinite or not a number. By default
            only if the step skips updates that are not finite, as with ``skip_nonfinite`` and
            with dynamic loss scaling; and then until a hundred losses in a row were so.
        tokens_axes: The logical axes whose lengths, multiplied, count the tokens of a batch, in
            the array that has most. ``("batch",)`` counts examples.
        checkpoint: A folder for checkpoints, ``step_00000100`` and so on, each as
            ``save_train_state`` writes it, which ``CheckpointManager`` reads too. Several processes
            share the folder.
        save_every: After how many steps to save. The last step is saved anyway. The next steps are
            done while a checkpoint is written; all are complete when this returns or raises.
        keep: How many of the newest checkpoints to keep; None keeps all.
        keep_every: Checkpoints whose step is a multiple of this are kept too.
        best: The best checkpoints are kept too: the name of a metric, ``"min"`` or ``"max"``, and
            how many, one by default, such as ``("evaluation/loss", "min")``. The metrics are
            ``"loss"``, that of the step, and the numbers that the evaluation after it gave.
        resume: Whether to go on from the newest checkpoint. If not, there must not be any.
        evaluate_every: After how many steps, and after the last one, to evaluate.
        eval_step: ``eval_step(state, **batch) -> (loss, aux)``, as ``build_eval_step_fn`` gives
            it, or anything else that gives a tree of numbers.
        eval_batches: Its batches, read anew each time. What it returns is averaged, each batch
            counting the same.
        stop_event: A ``threading.Event`` or the like, for instance one that ``on_log`` sets: when
            it is set, the run ends after the step under way, and is saved.
        on_stop: After a signal, ``"raise"`` or ``"return"``.

    Returns:
        The state after the last step.

    Raises:
        NonFiniteLossError: The loss is infinite or not a number; names the step.
        TrainingStoppedError: The batches ended early, or the folder is of another run. Like the
            error above, and any other that ends the steps, it has the last ``state``.
        ShardingError: An argument cannot be read, a batch cannot be placed, or as ``step`` does.
        CheckpointWriteError: The state cannot be saved.
        Exception: What the iterator of batches raised; the state is saved before.

    >>> import optax, jax.numpy as jnp
    >>> from penzai_shard import build_train_step_fn
    >>> def loss_fn(model, rng, state, x):
    ...     loss = jnp.sum((model["w"] - x) ** 2)
    ...     return loss, state, {"loss": loss}
    >>> state = TrainState.initial_state({"w": jnp.zeros(3)}, optax.sgd(0.25), jax.random.key(0))
    >>> step = build_train_step_fn(loss_fn, donate_params_and_state=True)
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
    _refuse_other_states(state, step)
    _check_numbers(
        steps=steps,
        log_every=log_every,
        save_every=save_every,
        keep=keep,
        keep_every=keep_every,
        evaluate_every=evaluate_every,
    )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise RuleTypeError(f"prefetch must be a number of batches, 0 or more, not {prefetch!r}.")
    if on_stop not in ("raise", "return"):
        raise RuleTypeError(f"on_stop must be 'raise' or 'return', not {on_stop!r}.")
    for name, value in (("save_every", save_every), ("keep_every", keep_every), ("best", best)):
        if checkpoint is None and value is not None:
            raise RuleTypeError(f"{name} needs a folder: pass checkpoint='run' too.")
    if steps is None and jax.process_count() > 1:
        raise RuleTypeError(
            "over several processes fit needs to know the last step, because the batches of one "
            "may end before those of another. Pass steps=1000."
        )
    source = BatchSource(batches)
    place = _placing(shard_batch, mesh, rules, first_axis)
    evaluation = Evaluation.of(evaluate_every, eval_step, eval_batches, place, prefetch)
    display = progress_display(progress)
    folder = None
    if checkpoint is not None:
        _refuse_metrics_that_are_missing(best, loss, save_every, evaluate_every)
        folder = RunFolder(checkpoint, keep=keep, keep_every=keep_every, best=best)
    options = LoopOptions(
        last=steps,
        place=place,
        ahead=prefetch,
        log_every=log_every,
        on_log=on_log,
        loss=loss,
        most_nonfinite=_most_nonfinite(allow_nonfinite, state),
        count_tokens=functools.partial(token_count, tuple(tokens_axes)),
        save_every=save_every,
        evaluation=evaluation,
        stop_event=stop_event,
    )
    with display:
        frees = getattr(step, "donate", False)
        state, position, saved = _starting_point(
            state, folder, steps, display, resume=resume, frees=frees
        )
        if saved is not None and steps is not None and saved >= steps:
            return state
        loop = TrainingLoop(state, step, source, position, options, folder, display, saved)
        reason = loop.run()
        if reason is StopReason.NONE:
            return loop.state
        message = _stop_text(reason, loop, steps, folder)
        display.say(message)
    error = reason.error(message, loop.state)
    if error is not None and on_stop == "raise":
        raise error
    return loop.state


def _starting_point(
    state: TrainState,
    folder: RunFolder | None,
    steps: int | None,
    display: ProgressDisplay,
    *,
    resume: bool,
    frees: bool,
) -> tuple[TrainState, Position, int | None]:
    """The state to start from, its place in the batches, and the step of its checkpoint."""
    given = 0 if is_abstract(state.step) else int(state.step)
    newest = None
    if folder is not None:
        folder.prepare()
        if not resume:
            folder.refuse_other_run()
        newest = folder.newest()
    if folder is None or newest is None:
        if steps is not None and given >= steps:
            raise TrainingStoppedError(
                f"the train state is at step {given} already, and steps={steps} says where the run "
                f"ends. To train {steps} steps more: steps={given + steps}.",
                state=state,
            )
        if is_abstract(state.step):
            raise RuleTypeError(
                "this train state is abstract, and there is no checkpoint to fill it from. Make "
                "one with values, for instance with Layout.build."
            )
        return state, Position(), None
    if newest < given:
        raise TrainingStoppedError(
            f"the train state is at step {given}, and the newest checkpoint in {folder.where} is "
            f"that of step {newest}: it is of another run, or of an earlier part of this one. "
            "Choose another folder.",
            state=state,
        )
    restored, position = folder.restore(state, newest, frees=frees)
    is_free = _is_free(state)
    is_complete = steps is not None and newest >= steps
    display.say(
        f"{'complete' if is_complete else 'resumed'}: {folder.shown(newest)}, "
        f"{position.used} batches used"
    )
    # As it was before it was saved, so that it goes where the batches are.
    return jax.tree.map(_uncommitted, restored) if is_free else restored, position, newest


def _is_free(state: TrainState) -> bool:
    """Whether JAX may place all of a state."""
    leaves = jax.tree.leaves(state)
    return all(isinstance(leaf, jax.Array) and not leaf.committed for leaf in leaves)


def _uncommitted(leaf: jax.Array) -> jax.Array:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.numpy.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jax.numpy.asarray(np.asarray(leaf))


def _placing(
    shard_batch: Place | None, mesh: AnyMesh | None, rules: Any, first_axis: LogicalAxis | None
) -> Place:
    """The function that places a batch."""
    if shard_batch is not None:
        if not callable(shard_batch):
            raise RuleTypeError(
                "shard_batch must be a function that places a batch, not "
                f"{shard_batch!r:.80}. Write functools.partial(layout.shard_batch, mesh=mesh), or "
                "pass mesh= and rules=."
            )
        if mesh is not None or rules is not None:
            raise RuleTypeError("give either shard_batch, or mesh and rules, but not both.")
        if first_axis is not None:
            raise RuleTypeError(
                "shard_batch places batches, so it must know what first_axis says. Write "
                "shard_batch=functools.partial(layout.shard_batch, mesh=mesh, "
                f"first_axis={first_axis!r})."
            )
        return shard_batch
    if mesh is not None:
        return functools.partial(place_batch, mesh=mesh, rules=rules, first_axis=first_axis)
    for name, value in (("rules need", rules), ("first_axis needs", first_axis)):
        if value is not None:
            raise RuleTypeError(f"{name} a mesh: pass mesh=make_mesh({{...}}) too.")
    return lambda batch: batch


def _most_nonfinite(allowed: bool | None, state: TrainState) -> int | None:
    """How many losses in a row may be infinite or not a number; None for any number."""
    if allowed is not None:
        return None if allowed else 0
    return MOST_SKIPPED if SKIPPED in peek(state, "guards") else 0


def _refuse_other_states(state: Any, step: Any) -> None:
    if hasattr(state, "step_fn") and hasattr(state, "state"):
        raise RuleTypeError(
            "fit takes a TrainState and a step, not a StatefulTrainer. Write "
            "trainer.state = fit(trainer.state, trainer.step_fn, batches, steps=...)."
        )
    if not isinstance(state, TrainState):
        raise RuleTypeError(
            f"fit takes a TrainState first, fit(state, step, batches, steps=...), and got a "
            f"{type(state).__name__}. Make one: TrainState.initial_state(model, optimizer, "
            "jax.random.key(0))."
        )
    if not callable(step):
        raise RuleTypeError(
            f"fit takes the step second, fit(state, step, batches, steps=...), and got a "
            f"{type(step).__name__}. Make one: build_train_step_fn(loss_fn)."
        )


def _refuse_metrics_that_are_missing(
    best: Any, loss: LossOf, save_every: int | None, evaluate_every: int | None
) -> None:
    """Refuses a metric by which no checkpoint could ever be the best."""
    chosen = Best.of(best)
    if chosen is None or (chosen.metric == "loss" and loss is not None):
        return
    if chosen.metric.partition("/")[0] != EVALUATION:
        raise RuleTypeError(
            f"best={best!r}: the metrics of a checkpoint are 'loss', that of its step, and those "
            f"of its evaluation, such as '{EVALUATION}/loss'."
        )
    if evaluate_every is None or (save_every is not None and save_every % evaluate_every):
        raise RuleTypeError(
            f"best={best!r} compares evaluations, so that each step that is saved must be "
            f"evaluated. Pass evaluate_every={save_every or 100}, eval_step and eval_batches."
        )


def _check_numbers(**numbers: Any) -> None:
    for name, number in numbers.items():
        is_int = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if number is not None and not (is_int and number >= 1):
            raise RuleTypeError(f"{name} must be a positive integer, not {number!r}.")


def _stop_text(
    reason: StopReason, loop: TrainingLoop, steps: int | None, folder: RunFolder | None
) -> str:
    total = "" if steps is None else f" of {steps}"
    if folder is not None and loop.is_saved:
        kept = f"Saved to {folder.shown(loop.done)}; the same call goes on from there."
    elif reason is StopReason.EVENT:
        kept = ""
    else:
        kept = "The state is error.state; in a notebook, sys.last_value.state."
    return f"stopped after step {loop.done}{total} ({reason.text}). {kept}".rstrip()
