"""An env in a process of its own beside the worker that steps it, for envs that cannot share a process with their spares.

The worker has an `IsolatedEnv` in place of an `Env`. What is asked of it goes to the child as a message and comes back as one:
some 200 us a step. A child that dies is an env that raises; it belongs to the worker's process group and goes with it.

Messages: `(verb, arguments, keywords)` to the child; `(True, result)` or `(False, Raised)` back.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import socket
import subprocess
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

from slotloader.messages import pickling
from slotloader.messages.channel import Channel
from slotloader.messages.reports import how_it_ended, shortened
from slotloader.worker.envs import EnvContext, EnvFactory, call_factory
from slotloader.worker.kinds import Env, env_of
from slotloader.worker.processes import command, end_with

_END_LIMIT = 2.0  # seconds that a child which has closed its env may take to end


class _InChild(Exception):
    """The cause of an exception that came from the child: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Raised:
    """An exception of the child; pickled if it can be."""

    name: str
    text: str
    lines: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describes `error`."""
        try:
            pickled = pickling.dumps(error)
        except Exception:
            pickled = None
        return cls(type(error).__name__, str(error), shortened("".join(traceback.format_exception(error))), pickled)

    def error(self) -> BaseException:
        """The exception, with the traceback of the child as its cause."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled or b"")
        except Exception:
            error = RuntimeError(f"{self.name}: {self.text}")
        error.__cause__ = _InChild(self.lines)
        return error


class IsolatedEnv:
    """What `Env` is, for an env in a process of its own.

    Args:
      factory: of the env; travels by value.
      context: for the factory.

    Raises:
      RuntimeError: the child died; and whatever the env or its factory raises.
    """

    is_async = False

    def __init__(self, factory: EnvFactory, context: EnvContext) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                command("slotloader.worker.isolation", str(fd), str(os.getpid())), pass_fds=[fd], stdin=subprocess.DEVNULL
            )
        self._channel = Channel(ours)
        try:
            self.observation_space, self.action_space = self._ask("build", pickling.dumps(factory), context)
        except BaseException:
            self._end()
            raise

    def _ask(self, verb: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            self._channel.send_bytes(pickling.quick_dumps((verb, arguments, keywords)))
            (good, result), _ = self._channel.receive()
        except EOFError:
            status = self._process.wait()
            raise RuntimeError(f"the env's own process (pid {self._process.pid}) {how_it_ended(status)}") from None
        if good:
            return result
        raise result.error()

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """See `Env.reset`."""
        return self._ask("reset", seed, options)

    def step(self, action: Any) -> Any:
        """The env's own."""
        return self._ask("step", action)

    def read_reset(self, result: Any) -> Any:
        """The child has read it."""
        return result

    def read_step(self, result: Any) -> Any:
        """The child has read it."""
        return result

    def get_attr(self, name: str) -> Any:
        """An attribute of the env; a method as a function that calls it there."""
        is_method, value = self._ask("get_attr", name)
        return partial(self._ask, "call", name) if is_method else value

    def set_attr(self, name: str, value: Any) -> None:
        """Sets it there."""
        self._ask("set_attr", name, value)

    def close(self) -> None:
        """Closes the env and ends its process."""
        try:
            if self._process.poll() is None:
                self._ask("close")
        finally:
            self._end()

    def _end(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Server:
    """The child's side."""

    def __init__(self) -> None:
        self._env: Env | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _settled(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(result)

    def build(self, factory: bytes, context: EnvContext) -> Any:
        self._env = env_of(call_factory(pickle.loads(factory), context))
        return self._env.observation_space, self._env.action_space

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        return self.env.read_reset(self._settled(self.env.reset(seed, options)))

    def step(self, action: Any) -> Any:
        return self.env.read_step(self._settled(self.env.step(action)))

    def get_attr(self, name: str) -> tuple[bool, Any]:
        value = self.env.get_attr(name)
        return (True, None) if callable(value) else (False, value)

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        return self._settled(self.env.get_attr(name)(*arguments, **keywords))

    def set_attr(self, name: str, value: Any) -> None:
        self.env.set_attr(name, value)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            self._settled(env.close())

    @property
    def env(self) -> Env:
        assert self._env is not None, "it is built first"
        return self._env


def main(fd: str, parent: str) -> None:
    """Entry point of the child."""
    end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel, server = Channel(socket.socket(fileno=int(fd))), _Server()
    try:
        while True:
            (verb, arguments, keywords), _ = channel.receive()
            try:
                reply = pickling.quick_dumps((True, getattr(server, verb)(*arguments, **keywords)))
            except (Exception, SystemExit) as error:
                reply = pickling.dumps((False, Raised.of(error)))
            channel.send_bytes(reply)
    except EOFError:  # the worker has closed its end, or is gone
        server.close()
