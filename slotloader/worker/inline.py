"""The worker that runs inside `recv`, in the caller's thread."""

from __future__ import annotations

import asyncio

from slotloader.table.slots import SlotState
from slotloader.worker.config import WorkerConfig
from slotloader.worker.worker import Report, Worker

_ACTED = int(SlotState.ACTED)


class InlineWorker(Worker):
    """Serves one slot at a time, when the trainer has nothing else to do.

    Ctrl-C, and what else a signal handler of the caller may raise, is the caller's: it ends the `recv` that runs, and the
    step or reset that it struck is done again.
    """

    faults = (Exception, SystemExit, asyncio.CancelledError)

    def __init__(self, config: WorkerConfig, report: Report) -> None:
        super().__init__(config, report, in_process=True)
        self._next = 0  # where `serve_one` goes on

    def serve_one(self) -> bool:
        """Serves one slot, or does one reset ahead; False if there is nothing to do."""
        if self._table.paused_words[self.config.index]:
            return False
        if self.unstarted:
            return self.reset_one()
        acted = self._look()
        for at in (*range(self._next, len(acted)), *range(self._next)):  # in turn: no slot starves
            runner = self.runners[at]
            if acted[at] == _ACTED and not runner.failed:
                self._next = at + 1
                try:
                    self.advance(runner)
                except BaseException:  # the action is still to be done
                    runner.put_back()
                    raise
                return True
        return self.reset_one()
