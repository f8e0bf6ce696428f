"""The worker loop: serves the slots that have actions, then resets ahead, then sleeps.

One worker hosts some envs. It steps them one after another in its own thread; `lanes` has those that step each env in a lane
of its own. The moves of a single env are the same in all of them (`runner`), and so are the loop and the commands, here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from slotloader.messages.pickling import Packed
from slotloader.messages.reports import Answer, Built, Failed, failure_of
from slotloader.table.orders import Orders
from slotloader.table.publisher import Publisher
from slotloader.table.signals import Signal
from slotloader.table.slots import SlotState, Table
from slotloader.table.writer import SlotWriter
from slotloader.worker.config import WorkerConfig
from slotloader.worker.loops import Move, T, finish
from slotloader.worker.runner import EnvRunner

_ACTED = int(SlotState.ACTED)
IDLE_WAIT = 1.0
_REST_WAIT = 0.005  # seconds between looks whether the lanes of a paused worker have come to rest
_FOR_FAILED = ("rebuild", "remove")  # commands that an env takes which has failed

Report = Callable[[Any], None]


class Worker:
    """Steps its envs one after another in the calling thread; base of the others.

    Args:
      config: what to host.
      report: takes `Built`, `Failed`, `Answer` and `Remark` reports to the trainer; from any thread.
      in_process: worker and trainer share a process, so exceptions can be passed on as they are.

    Attributes:
      runners: the env of each slot that plays now, in the order of the slots.
      position: where a slot is in `runners`.
      unstarted: envs whose first reset is due.
      faults: what an env may raise: all there is, since nobody would hear of it otherwise.
    """

    faults: tuple[type[BaseException], ...] = (BaseException,)

    def __init__(self, config: WorkerConfig, report: Report, in_process: bool = False) -> None:
        self.config, self._report, self._in_process = config, report, in_process
        self.position = {slot: at for at, slot in enumerate(config.slots)}
        lives = config.lives or [0] * len(config.factories)
        self.runners = [self._make_runner(at, lives[at]) for at in range(len(config.factories))]
        self.unstarted = list(self.everyone())

    def _make_runner(self, at: int, life: int, spare: int = 0) -> EnvRunner:
        config, factory = self.config, self.config.factories[at]
        runner = EnvRunner(config.slots[at], config.index, factory or _removed, config.options, life, spare)
        runner.remark, runner.faults = self._report, self.faults
        if factory is None:
            runner.retire()
        return runner

    def everyone(self) -> Iterable[EnvRunner]:
        """Every env that this worker owns, without those that have been removed."""
        return [runner for runner in self.runners if not runner.removed]

    def _present(self) -> list[EnvRunner]:
        """The env that plays in each slot, without those that have been removed."""
        return [runner for runner in self.runners if not runner.removed]

    # Starting.

    def build(self) -> bool:
        """Builds every env and reports the specs, or the first failure; False if one failed."""
        for runner in self.everyone():
            try:
                self._settle(self._within(runner, runner.build))
            except self.faults as error:
                self._report(self._failure(runner, error))
                return False
        present = self._present()
        first = present[0].env
        self._report(
            Built(
                self.config.index,
                [(runner.observation, runner.action, runner.info) for runner in present],
                (first.observation_space, first.action_space),
            )
        )
        return True

    def attach(self, table: Table, wake: Sequence[Signal], fence: Callable[[], None]) -> None:
        """Binds the envs to the table; `wake` has one signal per receiver, `fence` is this process's own."""
        self._table = table
        self._look = _look_at(table, self.config.slots)
        self._orders = Orders(table, self.config.index)
        publisher, check = Publisher(table, wake, fence), self.config.options.check
        writers = {
            runner.slot: SlotWriter(table, runner.slot, publisher, runner.observation, runner.info, check)
            for runner in self._present()
        }
        for runner in self.everyone():
            runner.attach(table, writers[runner.slot])
            if table.owner[runner.slot] != self.config.index:  # the slot was given to another while this one was being built
                runner.failed = True

    def start(self) -> None:
        """Begins the first resets; here they are the first of `reset_one`, so that no slot waits for all of them."""

    # The loop.

    def run(self, signal: Signal, receive: Callable[[], Any]) -> None:
        """Works until told to stop.

        Args:
          signal: what the trainer posts after it has stored actions or a command.
          receive: takes the next command, `(ticket, verb, slots, ...)`; None if there is none.
        """
        try:
            self._run(signal, receive)
        except BaseException as error:
            if self._in_process:  # a process that ends is seen, a thread is not
                slots, note = tuple(runner.slot for runner in self.everyone()), "its worker has ended"
                self._report(dataclasses.replace(self._failure(self.runners[0], error), slots=slots, note=note))
            raise

    def _run(self, signal: Signal, receive: Callable[[], Any]) -> None:
        for seconds in self.passes(receive):
            signal.wait(seconds)

    def passes(self, receive: Callable[[], Any]) -> Iterator[float]:
        """The loop of every worker, until told to stop; yields for how long it may sleep, in seconds, unless it is woken."""
        self.start()
        table, index, orders = self._table, self.config.index, self._orders
        commands, stop, paused = table.command_words, table.stop_words, table.paused_words
        while not stop[index]:
            if commands[index]:
                orders.see_command()
                while (message := receive()) is not None:
                    self.obey(message)
            if paused[index]:
                if self.is_at_rest():
                    orders.rest(paused[index])
                    yield IDLE_WAIT
                else:
                    yield _REST_WAIT
                continue
            served = self.serve()
            # First resets are due between two passes; later ones only when no sibling has an action.
            if ((self.unstarted or not served) and self.reset_one()) or served:
                continue
            yield IDLE_WAIT

    def is_at_rest(self) -> bool:
        """Whether nothing runs beside the calling thread."""
        return True

    def serve(self) -> bool:
        """One pass over the slots that have actions; False if there were none."""
        acted = self._look()
        at = acted.find(_ACTED)
        if at < 0:
            return False
        served = False
        while at >= 0:
            runner = self.runners[at]
            if runner.started and not runner.failed:  # a new life first does its first reset, in `reset_one`
                self.advance(runner)
                served = True
            at = acted.find(_ACTED, at + 1)
        return served

    def advance(self, runner: EnvRunner) -> None:
        """Moves one ACTED slot on."""
        try:
            if runner.wants_reset or runner.is_async:
                runner.settle(runner.advance())
            elif runner.in_episode:  # spelled out: this is the hot path
                runner.finish_step(runner.begin_step())
            else:
                runner.answer_last()
        except self.faults as error:
            self._fail(runner, error)

    def reset_one(self) -> bool:
        """Resets one env: its very first time, or ahead of the action that will ask for its next episode."""
        if self.unstarted:
            runner = self.unstarted[0]
            runner.started = True
            try:
                runner.settle(runner.first_record())
            except self.faults as error:
                self._fail(runner, error)
            del self.unstarted[0]  # not before: Ctrl-C during an inline reset leaves it to be done again
            return True
        for runner in self.runners:
            if runner.wants_reset and runner.started and not runner.failed:
                runner.settle(runner.reset())
                return True
        return False

    def _failure(self, runner: EnvRunner, error: BaseException) -> Failed:
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            error = error.__cause__  # what a coroutine makes of it
        step = runner.steps_taken + (runner.phase == "step")  # the call that failed counts: "at step 7" is the seventh
        return failure_of(self.config.index, runner.slot, runner.phase, step, error, self._in_process)

    def _fail(self, runner: EnvRunner, error: BaseException) -> None:
        if runner.lost:
            return  # it has been reported, and its slot may be somebody else's by now
        runner.fail()
        self._report(self._failure(runner, error))

    # Commands.

    def obey(self, message: Sequence[Any]) -> None:
        """Carries out a command and reports the answer."""
        self._report(self.carry_out(*message))

    def carry_out(self, ticket: int, verb: str, slots: Sequence[int], *args: Any) -> Answer:
        """`answer` in the calling thread."""
        return self._settle(self.answer(ticket, verb, slots, *args))

    async def answer(self, ticket: int, verb: str, slots: Sequence[int], *args: Any) -> Answer:
        """Runs `verb` on the envs of `slots`, each between two of its steps.

        Args:
          ticket: of the answer.
          verb: "call", "get_attr", "set_attr", "rebuild", "remove" or "begin_life".
          slots: of this worker.
          args: see `EnvRunner.carry_out`; from another process they come as one pickle.
        """
        results: dict[int, Any] = {}
        try:
            args = args[0].load() if len(args) == 1 and isinstance(args[0], Packed) else args
        except self.faults as error:
            failure = failure_of(self.config.index, slots[0], verb, 0, error, self._in_process)
            return Answer(self.config.index, ticket, results, failure)
        for runner in [runner for runner in self.runners if runner.slot in slots]:
            try:
                if runner.failed and verb not in _FOR_FAILED:
                    raise RuntimeError("this env has failed; it takes no calls")
                for target in self._targets(runner, verb):
                    results[runner.slot] = await self._within(target, partial(target.carry_out, verb, args))
                if verb == "rebuild":
                    self._revive(runner)
                elif verb == "begin_life":
                    self._begin_turns(runner)
            except self.faults as error:
                runner.phase = verb
                return Answer(self.config.index, ticket, results, self._failure(runner, error))
        return Answer(self.config.index, ticket, results)

    def _targets(self, runner: EnvRunner, verb: str) -> Sequence[EnvRunner]:
        """The envs of a slot that a command is meant for."""
        return (runner,)

    def _revive(self, runner: EnvRunner) -> None:
        """Has a rebuilt env begin its first reset; here `reset_one` does it."""
        self.unstarted.append(runner)

    def _begin_turns(self, runner: EnvRunner) -> None:
        """A slot's envs begin another life: the first one plays its first episode, whoever has played last."""

    async def _within(self, runner: EnvRunner, move: Callable[[], Move[T]]) -> T:
        """Runs what is done to an env where its steps run, between two of them."""
        return runner.settle(move())

    def _settle(self, move: Move[T]) -> T:
        """Runs a coroutine of this worker to its end."""
        return finish(move)

    # The end.

    def close(self) -> None:
        """Closes every env once; an env whose close raises does not keep the others open."""
        for runner in self.everyone():
            try:
                try:
                    self._settle(self._within(runner, runner.close))
                finally:
                    runner.end()
            except self.faults as error:
                self._report(self._failure(runner, error))


def _look_at(table: Table, slots: Sequence[int]) -> Callable[[], bytes]:
    """Makes the function that reads the states of a worker's slots, one byte each, in their order."""
    first, end = slots[0], slots[-1] + 1
    if tuple(slots) == tuple(range(first, end)):
        return table.state_words[first:end].tobytes
    chosen, state = np.array(slots), table.state
    return lambda: state[chosen].tobytes()


def _removed() -> None:
    """The factory of an env that has been removed; never called."""
