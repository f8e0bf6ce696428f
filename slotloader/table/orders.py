"""What the trainer asks of one worker through its control words, and what the worker says back there."""

from __future__ import annotations

from slotloader.table.slots import Table


class Orders:
    """The words of one worker; it reads them itself, at each pass, and stores through this.

    Args:
      table: the region.
      worker: index of the worker.
    """

    def __init__(self, table: Table, worker: int) -> None:
        self._worker, self._command, self._resting = worker, table.command_words, table.resting_words

    def see_command(self) -> None:
        """Takes note that messages wait. Before they are read: one that comes meanwhile is read now or sets the word again."""
        self._command[self._worker] = 0

    def rest(self, pause: int) -> None:
        """Says that nothing runs any more and nothing will, for as long as `pause` is the number in the word `paused`."""
        self._resting[self._worker] = pause
