"""The examples that learn, each in a tiny form: they run to their end, print an evaluation and write their curve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = {
    "ppo_torch": ["--total-steps", "2000"],
    "ppo_jax": ["--total-steps", "2000"],
    "sac_torch": ["--total-steps", "1200", "--start-steps", "900"],
    "impala_torch": ["--total-steps", "3000", "--num-envs", "8", "--batch-size", "4", "--masked"],
    "impala_jax": ["--total-steps", "3000", "--num-envs", "8", "--batch-size", "4", "--masked"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", TINY)
def test_an_example_runs_to_its_evaluation_and_writes_its_curve(name: str, tmp_path: Path) -> None:
    curve = tmp_path / "curve.png"
    command = [sys.executable, "-W", "error::DeprecationWarning:slotloader", str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(
        [*command, *TINY[name], "--eval-episodes", "4", "--curve", str(curve)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "4 episodes on 4 slots" in result.stdout, result.stdout[-2000:]
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr, result.stderr[-2000:]
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_every_learning_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(TINY) | {"quickstart", "swap_policy"}
