"""Further envs of each slot, which reset while another one plays: a long reset costs the slot nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slotloader.worker.config import WorkerConfig
from slotloader.worker.lanes import ThreadedWorker
from slotloader.worker.runner import EnvRunner
from slotloader.worker.worker import Report


class SpareWorker(ThreadedWorker):
    """Keeps some envs for each slot. They take turns in a fixed order, whichever is ready first: runs stay reproducible."""

    def __init__(self, config: WorkerConfig, report: Report, in_process: bool = False) -> None:
        self._members: dict[int, list[EnvRunner]] = {}
        super().__init__(config, report, in_process)

    def _make_runner(self, at: int, life: int, spare: int = 0) -> EnvRunner:
        members = [super(SpareWorker, self)._make_runner(at, life, n) for n in range(self.config.options.spares + 1)]
        self._members[members[0].slot] = members
        return members[0]

    def everyone(self) -> Iterable[EnvRunner]:
        """See `Worker.everyone`."""
        return [runner for members in self._members.values() for runner in members if not runner.removed]

    def _targets(self, runner: EnvRunner, verb: str) -> Sequence[EnvRunner]:
        if verb in ("call", "get_attr"):
            return (runner,)  # the env that is playing
        return self._members[runner.slot]

    def _revive(self, runner: EnvRunner) -> None:
        first, *others = self._members[runner.slot]
        self.runners[self.position[runner.slot]] = first
        super()._revive(first)
        for spare in others:
            spare.started = True
            self._lanes[spare].put(spare.reset)

    def _begin_turns(self, runner: EnvRunner) -> None:
        first, *others = self._members[runner.slot]
        self.runners[self.position[runner.slot]] = first
        for spare in others:
            self._lanes[spare].put(spare.reset)

    def advance(self, runner: EnvRunner) -> None:
        """See `LaneWorker.advance`; the answer to a last record goes to the next env in turn."""
        if runner.finished:
            members = self._members[runner.slot]
            runner = members[(runner.spare + 1) % len(members)]
            self.runners[self.position[runner.slot]] = runner
        super().advance(runner)
