"""A progress bar for people, and the bounded iterators that show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TextIO, TypeVar

from slotloader.arguments import require_count

_REDRAW = 0.1  # seconds
_WIDTH = 28


class ProgressBar:
    """Draws a bar and a text on one line of a terminal, at most ten times a second.

    Args:
      show: True, False, or None for "if the stream is a terminal".
      stream: default stderr.
    """

    def __init__(self, show: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._show = self._stream.isatty() if show is None else show
        self._next = 0.0
        self._width = 0

    def update(self, share: float, text: Callable[[], str]) -> None:
        """Redraws if it is time; `share` is between 0 and 1, `text` is only called then."""
        now = time.monotonic()
        if self._show and now >= self._next:
            self._next = now + _REDRAW
            self._draw(share, text())

    def close(self, share: float, text: str) -> None:
        """Draws the last state and ends the line."""
        if self._show:
            self._draw(share, text)
            self._stream.write("\n")
            self._stream.flush()
            self._show = False

    def _draw(self, share: float, text: str) -> None:
        filled = int(min(share, 1.0) * _WIDTH)
        line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {text}"
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


class Counted(Protocol):
    """What is counted of a batch."""

    @property
    def env_steps(self) -> int:
        """Records that are not FIRST."""

    @property
    def episodes(self) -> list[Any]:
        """Episodes that ended."""

    @property
    def released(self) -> bool:
        """The batch was given back and will come again."""


B = TypeVar("B", bound=Counted)


class BoundedIterator(Iterator[B], Generic[B]):
    """Yields batches until a number of env steps or episodes has come in; answer the last batch too.

    Args:
      source: where batches come from.
      total: when to stop; the last batch may go beyond it.
      unit: "env steps" or "episodes".
      progress: show a bar; None shows it on a terminal.
    """

    def __init__(self, source: Iterable[B], total: Any, unit: str, progress: bool | None) -> None:
        self._total, self._unit = require_count(unit, total), unit
        self._batches = iter(source)
        self._bar = ProgressBar(progress)
        self._start = time.monotonic()
        self._last: B | None = None
        self.done = 0

    @property
    def complete(self) -> bool:
        """Whether all of it has come in; False where the source has ended before."""
        return self.done >= self._total

    def __next__(self) -> B:
        last = self._last
        if last is not None and not last.released:  # what was given back will come again
            self.done += len(last.episodes) if self._unit == "episodes" else last.env_steps
        self._last = None
        if self.done >= self._total:
            self._bar.close(1.0, self._text())
            raise StopIteration
        self._last = next(self._batches)
        self._bar.update(self.done / self._total, self._text)
        return self._last

    def _text(self) -> str:
        rate = self.done / max(time.monotonic() - self._start, 1e-9)
        left = f", {(self._total - self.done) / rate:.0f} s left" if 0 < self.done < self._total else ""
        return f"{self.done:,}/{self._total:,} {self._unit}, {rate:,.0f}/s{left}"
