"""What the processes that we start have in common: how they are started, and that they end with who started them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1


def import_path() -> list[str]:
    """`sys.path` as another process can use it."""
    return [entry or os.getcwd() for entry in sys.path]


def command(module: str, *arguments: str) -> list[str]:
    """A command line that calls `module.main(*arguments)` in a fresh interpreter with our `sys.path`."""
    boot = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(*sys.argv[2:])"
    path = [str(Path(__file__).resolve().parents[2]), *import_path()]
    return [sys.executable, "-c", boot, json.dumps(path), *arguments]


def prctl(option: int, value: int) -> None:
    """The system call of that name; nothing where there is none."""
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_with(parent: int) -> None:
    """Has this process be killed when the thread that started it ends; `parent` is the pid of its process."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above: nobody would ever end this process
        os._exit(1)
