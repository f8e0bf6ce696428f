"""README and docs say what is so: every code block runs, every link has an end, the API page is that of the docstrings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slotloader
import slotloader.device
import slotloader.learning
from slotloader.tools import api

ROOT = Path(slotloader.__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="only a checkout has the docs"),
]

# What a page takes for granted: the reader's own policy, learner and loader. `stack` ends with the test.
GIVEN = """
import gymnasium
import numpy as np
from gymnasium import spaces
from slotloader import EnvFailed, SlotLoader, WorkerDied
loader = stack.enter_context(SlotLoader("CartPole-v1", num_envs=2, backend="inline"))
def policy(obs):
    return np.zeros(len(obs), np.int64)
"""
GIVEN_LEARNING = """
import numpy as np, torch
from slotloader import Acted, SlotLoader, evaluate, to_torch
params = {"w": torch.zeros(4, 2)}
def act(params, inputs, state, key):
    return Acted((inputs.obs @ params["w"]).argmax(-1))
def learn(unroll):
    return params
def explore(obs):
    return np.zeros((len(obs), 1), np.float32)
class Replay:
    def extend(self, transitions):
        assert transitions.size >= 0
replay, gamma = Replay(), 0.99
batches = stack.enter_context(to_torch(stack.enter_context(SlotLoader("CartPole-v1", num_envs=2, backend="inline"))))
policy = batches.policy(act, params=params)
rollouts = batches.rollout(policy, length=4)
unroll = next(rollouts)
values = torch.zeros(5, 2)
"""


def blocks() -> Iterator[Any]:
    """Every Python block of every page."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
            line = text[: found.start()].count("\n") + 1
            yield pytest.param(page, found.group(1), id=f"{page.name}:{line}")


def shortened(code: str) -> str:
    """The same with budgets that a test can wait for."""
    code = re.sub(r"\b(20_000|10_000|640_000)\b", "300", code)
    return re.sub(r"\b(1000|100)\)", "3)", code).replace("episodes=100", "episodes=8").replace("length=128", "length=8")


@pytest.mark.parametrize(("page", "code"), list(blocks()))
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jax.*")
def test_a_code_block_of_the_docs_runs(page: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    given = GIVEN_LEARNING if page.name == "learning.md" else GIVEN
    module = "slotloader_docs_block"
    with contextlib.ExitStack() as stack:
        namespace: dict[str, Any] = {"__name__": module, "stack": stack}
        exec(compile(given, f"{page.name} (given)", "exec"), namespace)
        exec(compile(shortened(code), str(page.name), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_has_an_end(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_api_page_is_made_from_the_docstrings_of_today() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == api.page(), "python -m slotloader.tools.api > docs/api.md"


def test_every_file_that_the_docs_name_is_there() -> None:
    """`batching/former.py` and the like, as one_record.md and CONTRIBUTING name them."""
    for page in PAGES:
        if "decisions" in page.parts:
            continue  # they stand as they were written
        for name in re.findall(
            r"`((?:records|table|messages|worker|fleet|batching|device|learning|tools)/\w+\.py)`", page.read_text()
        ):
            assert (ROOT / "slotloader" / name).exists(), f"{page.name}: {name}"


PUBLIC = {
    "Acted",
    "ActionError",
    "Advantages",
    "Background",
    "Batch",
    "BytesColumn",
    "BytesTensor",
    "DeviceBatch",
    "DeviceBatches",
    "Dwell",
    "EnvContext",
    "EnvFailed",
    "Episode",
    "EpisodeKey",
    "EvalResult",
    "FleetStalled",
    "Inputs",
    "LeaseExpired",
    "LoaderClosed",
    "Policy",
    "Receiver",
    "RecordMismatch",
    "RecurrentState",
    "Rollouts",
    "Run",
    "SlotLoader",
    "SlotLoaderError",
    "SpecMismatch",
    "Stats",
    "StepType",
    "Transition",
    "Transitions",
    "Unroll",
    "Unrolls",
    "VTrace",
    "WorkerDied",
    "__version__",
    "evaluate",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "to_jax",
    "to_numpy",
    "to_torch",
    "vtrace",
}


def test_these_are_the_public_names_and_each_says_what_it_is() -> None:
    assert set(slotloader.__all__) == PUBLIC and list(slotloader.__all__) == sorted(slotloader.__all__)
    for name in sorted(PUBLIC - {"__version__", "to_jax", "to_torch"}):
        assert getattr(slotloader, name).__doc__, name


@pytest.mark.parametrize("face", [slotloader.device, slotloader.learning], ids=lambda face: face.__name__)
def test_the_faces_of_device_and_learning_have_what_they_list_and_each_says_what_it_is(face: Any) -> None:
    assert list(face.__all__) == sorted(face.__all__)
    for name in set(face.__all__) - {"Own", "FrameStack"}:  # these two are types in other words
        assert getattr(face, name).__doc__, name
