"""The worker loop: serves the slots that have actions, then resets ahead, then sleeps.

One worker hosts some envs. It steps them one after another, in one thread each (`worker_threads`), or as tasks of one
event loop (async envs); the moves of a single env are the same in all three (`runner`).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from slotloader.worker.envs import EnvFactory
from slotloader.worker.runner import EnvOptions, EnvRunner

_STARTING, _ACTED = int(SlotState.STARTING), int(SlotState.ACTED)
_IDLE_WAIT = 1.0
_REST_WAIT = 0.005  # seconds between looks whether the lanes of a paused worker have come to rest

Report = Callable[[Any], None]


@dataclass(frozen=True)
class WorkerConfig:
    """What one worker hosts.

    Attributes:
      index: which worker of the loader it is.
      slots: the slots of its envs, ascending; they need not be neighbours, but a worker looks over neighbours faster.
      factories: one per slot; None where the env has been removed.
      options: what all envs share.
      threads: step each env in a thread of its own.
      lives: life of each env; default all 0.
    """

    index: int
    slots: tuple[int, ...]
    factories: Sequence[EnvFactory | None]
    options: EnvOptions
    threads: bool = False
    lives: Sequence[int] = ()


class Worker:
    """Steps its envs one after another in the calling thread; base of the other two.

    Args:
      config: what to host.
      report: takes `Built`, `Failed`, `Answer` and `Remark` reports to the trainer.
      in_process: worker and trainer share a process, so exceptions can be passed on as they are.
    """

    def __init__(self, config: WorkerConfig, report: Report, in_process: bool = False) -> None:
        self.config, self._report, self._in_process = config, report, in_process
        lives = config.lives or [0] * len(config.factories)
        self.runners = [self._make_runner(at, lives[at]) for at in range(len(config.factories))]
        self.unstarted = list(self.everyone())  # envs whose first reset is due
        self._next = 0  # where `serve_one` goes on
        self.position = {slot: at for at, slot in enumerate(config.slots)}  # in `runners`

    def _make_runner(self, at: int, life: int, spare: int = 0) -> EnvRunner:
        config, factory = self.config, self.config.factories[at]
        runner = EnvRunner(config.slots[at], config.index, factory or _removed, config.options, life, spare)
        runner.remark = self._report
        if factory is None:
            runner.retire()
        return runner

    def everyone(self) -> Iterable[EnvRunner]:
        """Every env that this worker owns, without those that have been removed."""
        return [runner for runner in self.runners if not runner.removed]

    def _present(self) -> list[EnvRunner]:
        """The env that plays in each slot, without those that have been removed."""
        return [runner for runner in self.runners if not runner.removed]

    def build(self) -> bool:
        """Builds every env and reports the specs, or the first failure; False if one failed."""
        for runner in self.everyone():
            try:
                self._within(runner, runner.build)
            except (Exception, SystemExit) as error:
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
        self._states = table.state_words
        self._look = _look_at(table, self.config.slots)
        publisher = Publisher(table, wake, fence)
        check, self._orders = self.config.options.check, Orders(table, self.config.index)
        writers = {
            runner.slot: SlotWriter(table, runner.slot, publisher, runner.observation, runner.info, check)
            for runner in self.runners
            if not runner.removed
        }
        for runner in self.everyone():
            runner.attach(table, writers[runner.slot])
            if table.owner[runner.slot] != self.config.index:  # the slot was given to another while this one was being built
                runner.failed = True

    def start(self) -> None:
        """Begins the first resets; here they are the first of `reset_one`, so that no slot waits for all of them."""

    def _first_record(self, runner: EnvRunner) -> None:
        runner.started = True
        try:
            runner.reset()
            if self._states[runner.slot] == _STARTING:  # else a record of the last life has not been answered yet
                runner.publish_first()
        except (Exception, SystemExit) as error:
            self._fail(runner, error)

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

    def serve_one(self) -> bool:
        """Serves one slot, or does one reset ahead; False if there is nothing to do (inline backend)."""
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
                except BaseException:  # Ctrl-C in the caller's thread: the action is still to be done
                    runner.put_back()
                    raise
                return True
        return self.reset_one()

    def advance(self, runner: EnvRunner) -> None:
        """Moves one ACTED slot on."""
        try:
            runner.advance()
        except (Exception, SystemExit) as error:
            self._fail(runner, error)

    def reset_one(self) -> bool:
        """Resets one env: its very first time, or ahead of the action that will ask for its next episode."""
        if self.unstarted:
            self._first_record(self.unstarted[0])
            del self.unstarted[0]  # not before: Ctrl-C during an inline reset leaves it to be done again
            return True
        for runner in self.runners:
            if runner.wants_reset and runner.started and not runner.failed:
                runner.reset()
                return True
        return False

    def _failure(self, runner: EnvRunner, error: BaseException) -> Failed:
        step = runner.steps_taken + (runner.phase == "step")  # the call that failed counts: "at step 7" is the seventh
        return failure_of(self.config.index, runner.slot, runner.phase, step, error, self._in_process)

    def _fail(self, runner: EnvRunner, error: BaseException) -> None:
        runner.fail()
        self._report(self._failure(runner, error))

    def run(self, signal: Signal, receive: Callable[[], Any]) -> None:
        """The loop of a worker of its own: until told to stop.

        Args:
          signal: what the trainer posts after it has stored actions or a command.
          receive: takes the next command message, `(ticket, verb, ...)`.
        """
        self.start()
        table, index = self._table, self.config.index
        commands, stop = table.command_words, table.stop_words
        paused = table.paused_words
        while True:
            if stop[index]:
                return
            if commands[index]:
                self._orders.see_command()
                self.obey(receive)
            if paused[index]:
                if self.is_at_rest():
                    self._orders.rest(paused[index])
                    signal.wait(_IDLE_WAIT)
                else:
                    signal.wait(_REST_WAIT)
                continue
            served = self.serve()
            # First resets are due between two passes; later ones only when no sibling has an action.
            if ((self.unstarted or not served) and self.reset_one()) or served:
                continue
            signal.wait(_IDLE_WAIT)

    def is_at_rest(self) -> bool:
        """Whether nothing runs beside the calling thread."""
        return True

    def obey(self, receive: Callable[[], Any]) -> None:
        """Carries out every command that waits."""
        while (message := receive()) is not None:
            self._report(self.carry_out(*message))

    def carry_out(self, ticket: int, verb: str, slots: Sequence[int], *args: Any) -> Answer:
        """Runs `verb` on the envs of `slots` between two of their steps."""
        results: dict[int, Any] = {}
        try:
            args = tuple(arguments_of(args))
        except Exception as error:
            return Answer(self.config.index, ticket, results, self._unreadable(verb, slots, error))
        for runner in self.runners:
            if runner.slot not in slots:
                continue
            try:
                if runner.failed and verb not in ("rebuild", "remove"):
                    raise RuntimeError("this env has failed; it takes no calls")
                for target in self._targets(runner, verb):
                    results[runner.slot] = self._within(target, partial(_settled_call, target, verb, args))
                if verb == "rebuild":
                    self._revive(runner)
                elif verb == "begin_life":
                    self._begin_turns(runner)
            except (Exception, SystemExit) as error:
                runner.phase = verb
                failure = self._failure(runner, error)
                return Answer(self.config.index, ticket, results, failure)
        return Answer(self.config.index, ticket, results)

    def _unreadable(self, verb: str, slots: Sequence[int], error: BaseException) -> Failed:
        return failure_of(self.config.index, slots[0], verb, 0, error, self._in_process)

    def _targets(self, runner: EnvRunner, verb: str) -> Sequence[EnvRunner]:
        """The envs of a slot that a command is meant for."""
        return (runner,)

    def _revive(self, runner: EnvRunner) -> None:
        """Has a rebuilt env begin its first reset; here `reset_one` does it."""
        self.unstarted.append(runner)

    def _begin_turns(self, runner: EnvRunner) -> None:
        """A slot's envs begin another life: the first one plays its first episode, whoever has played last."""

    def _within(self, runner: EnvRunner, function: Callable[[], Any]) -> Any:
        """Runs `function` in the thread that owns the env."""
        return function()

    def close(self) -> None:
        """Closes every env once; an env whose close raises does not keep the others open."""
        for runner in self.everyone():
            try:
                self._within(runner, runner.close)
            except (Exception, SystemExit) as error:
                self._report(self._failure(runner, error))


def _look_at(table: Table, slots: Sequence[int]) -> Callable[[], bytes]:
    """Makes the function that reads the states of a worker's slots, one byte each, in their order."""
    first, end = slots[0], slots[-1] + 1
    if tuple(slots) == tuple(range(first, end)):
        return table.state_words[first:end].tobytes
    chosen, state = np.array(slots), table.state
    return lambda: state[chosen].tobytes()


def arguments_of(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a command; from another process they come as one pickle."""
    if len(args) == 1 and isinstance(args[0], Packed):
        unpacked: Sequence[Any] = args[0].load()
        return unpacked
    return args


def _removed() -> None:
    """The factory of an env that has been removed; never called."""


def _settled_call(runner: EnvRunner, verb: str, args: Sequence[Any]) -> Any:
    return runner.settle(_call(runner, verb, args))


def _call(runner: EnvRunner, verb: str, args: Sequence[Any]) -> Any:
    if verb == "call":
        name, positional, keywords = args
        return runner.call(name, positional, keywords)
    if verb == "get_attr":
        return runner.get_attr(args[0])
    if verb == "set_attr":
        return runner.set_attr(args[0], args[1][runner.slot])
    if verb == "rebuild":
        return runner.rebuild_async(args[0][runner.slot]) if runner.is_async else runner.rebuild(args[0][runner.slot])
    if verb == "remove":
        return runner.remove()
    if verb == "begin_life":
        lives, evaluations = args
        return runner.begin_life(lives[runner.slot], evaluations.get(runner.slot))
    raise ValueError(f"unknown command {verb!r}")


class Lane:
    """A thread that runs functions for one env, in order."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._put = self._done = 0
        self._putting = threading.Lock()  # control calls come from threads of their own
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while (function := self._work.get()) is not None:
            with contextlib.suppress(Exception, SystemExit):  # functions report by themselves; the lane must not end
                function()
            self._done += 1

    def put(self, function: Callable[[], None]) -> None:
        """Queues a function that does not raise."""
        with self._putting:
            self._put += 1
        self._work.put(function)

    def is_busy(self) -> bool:
        """Whether something runs or waits to run."""
        return self._done != self._put

    def result_of(self, function: Callable[[], Any]) -> Any:
        """Runs `function` in the lane and waits for its result or exception."""
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((function(), None))
            except BaseException as error:
                done.put((None, error))

        self.put(run)
        result, error = done.get()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Lets the thread finish after what is queued."""
        self._work.put(None)


class ThreadedWorker(Worker):
    """Steps every env in a lane of its own, for envs that wait on I/O."""

    def __init__(self, config: WorkerConfig, report: Report, in_process: bool = False) -> None:
        super().__init__(config, report, in_process)
        self.unstarted = []  # lanes begin them
        self._lanes = {runner: Lane(f"slotloader-env-{runner.slot}") for runner in self.everyone()}

    def _within(self, runner: EnvRunner, function: Callable[[], Any]) -> Any:
        return self._lanes[runner].result_of(function)

    def start(self) -> None:
        """See `Worker.start`."""
        for runner in self._present():
            self._revive(runner)

    def _revive(self, runner: EnvRunner) -> None:
        runner.started = True
        self._lanes[runner].put(partial(self._first_record, runner))

    def is_at_rest(self) -> bool:
        """See `Worker.is_at_rest`."""
        return not any(lane.is_busy() for lane in self._lanes.values())

    def obey(self, receive: Callable[[], Any]) -> None:
        """See `Worker.obey`. A command waits for the lanes of its envs, and the other envs must not wait for it."""
        while (message := receive()) is not None:
            threading.Thread(target=self._obey_one, args=(message,), name="slotloader-call", daemon=True).start()

    def _obey_one(self, message: Any) -> None:
        self._report(self.carry_out(*message))

    def advance(self, runner: EnvRunner) -> None:
        """Claims the slot and lets its lane serve it."""
        runner.claim()
        self._lanes[runner].put(lambda: self._advance_and_reset(runner))

    def _advance_and_reset(self, runner: EnvRunner) -> None:
        super().advance(runner)
        if runner.wants_reset and not runner.failed:
            runner.reset()

    def reset_one(self) -> bool:
        """Lanes reset by themselves."""
        return False

    def close(self) -> None:
        """See `Worker.close`."""
        super().close()
        for lane in self._lanes.values():
            lane.end()


class SpareWorker(ThreadedWorker):
    """Keeps further envs of each slot that reset while another one plays: a long reset costs the slot nothing.

    Envs take turns in a fixed order, whichever is ready first, so that runs stay reproducible.
    """

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

    def _unreadable(self, verb: str, slots: Sequence[int], error: BaseException) -> Failed:
        return failure_of(self.config.index, slots[0], verb, 0, error, self._in_process)

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
        """See `ThreadedWorker.advance`; the answer to a last record goes to the next env in turn."""
        if runner.finished:
            members = self._members[runner.slot]
            runner = members[(runner.spare + 1) % len(members)]
            self.runners[self.position[runner.slot]] = runner
        super().advance(runner)


class AsyncWorker(Worker):
    """Serves its slots as tasks of one event loop, for envs with `async def reset` and `step`."""

    def start(self) -> None:
        """Nothing yet: first records are tasks too, made by `run`."""

    def run(self, signal: Signal, receive: Callable[[], Any]) -> None:
        """See `Worker.run`. A helper thread turns posts into wake-ups of the event loop."""
        self._loop = asyncio.new_event_loop()
        for runner in self.runners:
            runner.adopt_loop(self._loop)
        self._loop.run_until_complete(self._serve_until_stop(signal, receive))
        self._loop.run_until_complete(_cancel_all())

    async def _serve_until_stop(self, signal: Signal, receive: Callable[[], Any]) -> None:
        loop, woken, ended = self._loop, asyncio.Event(), threading.Event()

        def watch() -> None:
            while not ended.is_set():
                signal.wait(_IDLE_WAIT)
                loop.call_soon_threadsafe(woken.set)  # the loop is only closed once this thread has ended

        thread = threading.Thread(target=watch, name="slotloader-wake", daemon=True)
        thread.start()
        self._busy = {runner.slot: asyncio.Lock() for runner in self.runners}
        self._firsts: set[asyncio.Task[None]] = set()
        tasks = {loop.create_task(self._first_async(runner)) for runner in self._present()}
        table, index = self._table, self.config.index
        commands, stop = table.command_words, table.stop_words
        paused = table.paused_words
        while not stop[index]:
            if commands[index]:
                self._orders.see_command()
                while (message := receive()) is not None:
                    tasks.add(loop.create_task(self._carry_out_async(message)))
            acted = b""
            if paused[index]:
                self._orders.rest(paused[index])
            else:
                acted = self._look()
            for runner, state in zip(self.runners, acted, strict=False):
                if state == _ACTED and not runner.failed and not runner.removed:
                    runner.claim()
                    tasks.add(loop.create_task(self._advance_async(runner)))
            tasks = {task for task in tasks if not task.done()}
            await woken.wait()
            woken.clear()
        ended.set()
        signal.post()
        await loop.run_in_executor(None, thread.join)
        await loop.shutdown_default_executor()

    def close(self) -> None:
        """See `Worker.close`. The envs' loop goes last: their own `close` may need it."""
        super().close()
        if hasattr(self, "_loop"):
            self._loop.close()

    async def _first_async(self, runner: EnvRunner) -> None:
        try:
            async with self._busy[runner.slot]:
                await runner.reset_async()
                if self._states[runner.slot] == _STARTING:
                    runner.publish_first()
        except (Exception, SystemExit) as error:
            self._fail(runner, error)

    async def _advance_async(self, runner: EnvRunner) -> None:
        try:
            async with self._busy[runner.slot]:
                await runner.advance_async()
                if runner.wants_reset:
                    await runner.reset_async()
        except (Exception, SystemExit) as error:
            self._fail(runner, error)

    async def _carry_out_async(self, message: Any) -> None:
        ticket, verb, slots, *args = message
        results: dict[int, Any] = {}
        failure = None
        try:
            args = list(arguments_of(args))
        except Exception as error:
            self._report(Answer(self.config.index, ticket, results, self._unreadable(verb, slots, error)))
            return
        for runner in [runner for runner in self.runners if runner.slot in slots]:
            try:
                if runner.failed and verb not in ("rebuild", "remove"):
                    raise RuntimeError("this env has failed; it takes no calls")
                async with self._busy[runner.slot]:
                    result = _call(runner, verb, args)
                    results[runner.slot] = await result if asyncio.iscoroutine(result) else result
                if verb == "rebuild":
                    first = self._loop.create_task(self._first_async(runner))
                    self._firsts.add(first)  # the loop itself holds tasks weakly
                    first.add_done_callback(self._firsts.discard)
            except (Exception, SystemExit) as error:
                runner.phase = verb
                failure = self._failure(runner, error)
                break
        self._report(Answer(self.config.index, ticket, results, failure))


async def _cancel_all() -> None:
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def make_worker(config: WorkerConfig, report: Report, in_process: bool = False) -> Worker:
    """The worker for a configuration, with its envs not yet built."""
    if config.options.spares:
        return SpareWorker(config, report, in_process)
    return (ThreadedWorker if config.threads else Worker)(config, report, in_process)


def choose(worker: Worker, report: Report, in_process: bool = False) -> Worker:
    """The worker to go on with once the envs exist: the event loop if all of them are async.

    The built runners move over, so no env is built twice.
    """
    if type(worker) is not Worker or not all(runner.is_async for runner in worker.everyone()):
        return worker
    chosen = AsyncWorker(worker.config, report, in_process)
    chosen.runners = worker.runners
    return chosen
