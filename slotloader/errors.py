"""The exceptions of SlotLoader: one class for each thing a caller can do about it."""

from __future__ import annotations

from collections.abc import Sequence


class SlotLoaderError(Exception):
    """Base class of everything that SlotLoader raises on purpose."""


class SpecMismatch(SlotLoaderError, ValueError):
    """A value or a space does not fit what was declared; the text names place, expected and found."""


class ActionError(SlotLoaderError, ValueError):
    """`send` was refused; no env has stepped, the batch can be answered again."""


class LeaseExpired(SlotLoaderError, RuntimeError):
    """Rows of a batch were touched after they had been sent or released."""


class FleetStalled(SlotLoaderError, TimeoutError):
    """Too few records arrived in time; none was taken, `recv` may be called again.

    Attributes:
      slots: the slots that are overdue, slowest first.
    """

    def __init__(self, message: str, slots: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.slots = tuple(slots)


class LoaderClosed(SlotLoaderError, RuntimeError):
    """The loader was closed; build a new one."""


class EnvFailed(SlotLoaderError, RuntimeError):
    """An environment raised; its worker lives on.

    Attributes:
      slots: the slots of the failed environments.
      pid: process id of the worker, or of this process for threads.
      remote_traceback: traceback text from the worker; empty when there is none.
    """

    def __init__(self, message: str, slots: Sequence[int] = (), pid: int = 0, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.slots = tuple(slots)
        self.pid = pid
        self.remote_traceback = remote_traceback


class RecordMismatch(EnvFailed, SpecMismatch):
    """An environment returned a record that breaks its declared spaces; both an `EnvFailed` and a `SpecMismatch`."""


class WorkerDied(SlotLoaderError, RuntimeError):
    """A worker process ended without being asked to.

    Attributes:
      slots: the slots that it served.
      pid: its process id.
      exitcode: exit status, negative for a signal number, as in `subprocess`.
    """

    def __init__(self, message: str, slots: Sequence[int] = (), pid: int = 0, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.slots = tuple(slots)
        self.pid = pid
        self.exitcode = exitcode
