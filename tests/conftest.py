"""Shared fixtures: `clean` (CLEAN of FAULTS.md), `how` (the backends), `packed` (the backends and their packings)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from checks import clean as clean_block

# Before torch, numpy's BLAS and jax are imported: their threads spin for the cores that workers need.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; scripts that get Ctrl-C would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

BACKENDS: dict[str, dict[str, Any]] = {
    "process": {"backend": "process", "preload": ["toys"]},
    "thread": {"backend": "thread"},
    "inline": {"backend": "inline"},
}
PACKED: dict[str, dict[str, Any]] = {
    **{f"process-{n}": {**BACKENDS["process"], "envs_per_worker": n} for n in (1, 2, 4)},
    "process-threads": {**BACKENDS["process"], "envs_per_worker": 2, "worker_threads": True},
    **{f"thread-{n}": {"backend": "thread", "envs_per_worker": n} for n in (1, 4)},
    "thread-threads": {"backend": "thread", "envs_per_worker": 2, "worker_threads": True},
    "inline": {"backend": "inline"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the heavy tests marked `soak`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--soak"):
        for item in items:
            if "soak" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="heavy; run with --soak"))


@pytest.fixture(params=BACKENDS)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keyword arguments of SlotLoader that choose a backend."""
    return dict(BACKENDS[request.param])


@pytest.fixture(params=PACKED)
def packed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keyword arguments of SlotLoader that choose a backend and a packing."""
    return dict(PACKED[request.param])


@pytest.fixture
def clean() -> Iterator[None]:
    """CLEAN around a test."""
    with clean_block():
        yield
