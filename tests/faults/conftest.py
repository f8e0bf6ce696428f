"""Fixtures of the fault tests: the backends with the sick envs preloaded, and no core files of the crashes they cause."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest
from sick import PRELOAD

pytest.register_assert_rewrite("play")

BACKENDS: dict[str, dict[str, Any]] = {
    "process": {"backend": "process", "preload": PRELOAD},
    "thread": {"backend": "thread"},
    "inline": {"backend": "inline"},
}


@pytest.fixture(params=BACKENDS)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keyword arguments of SlotLoader that choose a backend."""
    return dict(BACKENDS[request.param])


@pytest.fixture(autouse=True, scope="session")
def no_core_files() -> Iterator[None]:
    """Crashes here are on purpose."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)
