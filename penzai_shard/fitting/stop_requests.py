"""Ending a training loop between two steps: Ctrl-C, the SIGTERM of clusters, and an event.

The first signal asks the loop to stop after the step under way; a second one does what it would
do without the loop, at once. Several processes stop after the same step: each says with every step
whether it was asked to, in a program of one number that runs behind that step, and all of them read
the result after the next step was given to the devices, so that nothing waits for it.
"""

import enum
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StopEvent(Protocol):
    """What ``threading.Event`` offers."""

    def is_set(self) -> bool:
        """Whether to stop."""


class StopReason(enum.IntEnum):
    """Why a loop ends before its last step; of several, the largest counts."""

    NONE = 0
    EVENT = 1
    INTERRUPTED = 2
    TERMINATED = 3

    @property
    def text(self) -> str:
        """The reason in a sentence."""
        return {
            StopReason.EVENT: "stop_event was set",
            StopReason.INTERRUPTED: "Ctrl-C",
            StopReason.TERMINATED: "SIGTERM",
        }[self]

    def error(self, message: str, state: Any) -> BaseException | None:
        """What the signal stands for in Python; None for an event, which is not an error."""
        found: BaseException | None = {
            StopReason.EVENT: None,
            # Exactly this type: Python ends a program with the status of Ctrl-C for it alone.
            StopReason.INTERRUPTED: KeyboardInterrupt(message),
            StopReason.TERMINATED: SystemExit(128 + signal.SIGTERM),
        }[self]
        if found is not None:
            found.state = state  # type: ignore[attr-defined]
            found.add_note(message)
        return found


_REASONS = {
    signal.SIGINT: StopReason.INTERRUPTED,
    signal.SIGTERM: StopReason.TERMINATED,
}


class StopRequests:
    """Notes the wish to stop while it is entered; handlers of signals are as before afterwards.

    Signals reach the main thread alone, so that in another one only the event counts. A signal
    that the process ignores, and a handler that was not set by Python, are left alone.
    """

    def __init__(self, event: StopEvent | None = None) -> None:
        self._event = event
        self._received = StopReason.NONE
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in _REASONS:
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:
                    self._handlers[number] = before
                    signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def reason(self) -> StopReason:
        """Why to stop, or that there is no reason to."""
        if self._received is StopReason.NONE and self._event is not None and self._event.is_set():
            return StopReason.EVENT
        return self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is StopReason.NONE:
            self._received = _REASONS[signal.Signals(number)]
            return
        self._restore()
        signal.raise_signal(number)

    def _restore(self) -> None:
        for number, before in self._handlers.items():
            # Whoever set another one meanwhile keeps it.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._handlers.clear()


class StopAgreement:
    """Has all processes of a job know, with every step, whether one of them was asked to stop."""

    def __init__(self) -> None:
        first = {device.process_index: device for device in reversed(jax.devices())}
        devices = np.array([first[index] for index in sorted(first)])
        mesh = Mesh(devices, ("process",))
        self._each = NamedSharding(mesh, PartitionSpec("process"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._largest = jax.jit(jax.numpy.max, out_shardings=everywhere)

    def shared(self, reason: StopReason) -> jax.Array:
        """The largest reason of all processes, still on the devices.

        All must call this equally often, and in the same order with their other programs.
        """
        own = np.array([int(reason)], np.int32)
        return self._largest(
            jax.make_array_from_process_local_data(self._each, own, (jax.process_count(),))
        )
