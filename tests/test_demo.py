"""What a new user runs first works as it stands: the examples, and `slotloader demo` with every framework."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from checks import ROOT, Ran, run_script

pytestmark = pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="only a checkout has examples")
FRAMEWORKS = ["numpy", *(name for name in ("torch", "jax") if importlib.util.find_spec(name) is not None)]


def example(path: Path, name: str, *arguments: str, without: str = "") -> Ran:
    """Runs an example as a script, as if framework `without` were not installed."""
    head = f"import sys\nsys.argv += {list(arguments)}\nsys.modules.update(dict.fromkeys({[without] if without else []}))\n"
    return run_script(path, head + (ROOT / "examples" / name).read_text(), "-W", "error", timeout=110)


def demo(path: Path, *arguments: str, without: str = "") -> Ran:
    head = f"import sys\nsys.modules.update(dict.fromkeys({[without] if without else []}))\n"
    code = f"from slotloader.tools.cli import main\nsys.exit(main({['demo', *arguments]}))"
    return run_script(path, head + code, "-W", "error", timeout=110)


def test_the_quickstart_runs_as_it_is(tmp_path: Path) -> None:
    ran = example(tmp_path, "quickstart.py")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("first batch: slots [") and "env steps/s" in ran.out


def test_three_frameworks_act_on_one_fleet_and_no_record_is_lost_or_repeated(tmp_path: Path) -> None:
    ran = example(tmp_path, "swap_policy.py", "--steps", "300", "--num-envs", "3")
    assert (ran.code, ran.err) == (0, "")
    acted = [line.split()[0] for line in ran.out.splitlines() if re.match(r"(numpy|torch|jax) +\d", line)]
    assert acted == FRAMEWORKS
    counted = re.search(r"ONCE holds: ([\d,]+) records, none lost or repeated", ran.out)
    assert counted and int(counted[1].replace(",", "")) > 300 * len(FRAMEWORKS), ran.out


def test_the_example_sees_a_record_that_is_lost(tmp_path: Path) -> None:
    """The proof proves something: an env that is stepped behind the consumer's back is noticed."""
    lossy = (ROOT / "examples" / "swap_policy.py").read_text()
    whole = "        obs, reward, terminated, truncated, info = self.env.step(action)\n        self.t += 1\n"
    assert whole in lossy
    lossy = lossy.replace(whole, whole + "        self.t += self.t == 20\n")
    head = "import sys\nsys.argv += ['--steps', '300', '--num-envs', '3', '--policies', 'numpy']\n"
    ran = run_script(tmp_path, head + lossy, "-W", "error")
    assert ran.code == 1 and "AssertionError: slots [" in ran.err and "ONCE" not in ran.out


@pytest.mark.parametrize("missing", ["torch", "jax"])
def test_the_example_runs_with_the_frameworks_that_are_there(tmp_path: Path, missing: str) -> None:
    ran = example(tmp_path, "swap_policy.py", "--steps", "50", "--policies", missing, "numpy", without=missing)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{missing}: not installed, skipped; pip install 'slotloader[{missing}]'\n")
    assert "ONCE holds" in ran.out


@pytest.mark.parametrize("policy", FRAMEWORKS)
def test_the_demo_runs_with_every_framework(tmp_path: Path, policy: str) -> None:
    ran = demo(tmp_path, "--policy", policy, "--env", "CartPole-v1", "--num-envs", "3", "--seconds", "0.5")
    assert ran.code == 0, ran.err
    assert "env steps/s" in ran.out and "restarted                             0" in ran.out
    assert ("buckets of 1, 2, 3 rows" in ran.out) == (policy != "numpy")
    assert ran.err.count("\n") == (2 if policy == "numpy" else 4), ran.err


@pytest.mark.parametrize("policy", FRAMEWORKS)
def test_the_demo_shows_screens_to_every_framework(tmp_path: Path, policy: str) -> None:
    pytest.importorskip("ale_py")
    ran = demo(tmp_path, "--policy", policy, "--num-envs", "2", "--num-workers", "1", "--seconds", "0.5")
    assert ran.code == 0, ran.err
    assert "env steps/s" in ran.out and ran.err.startswith("slotloader demo: 2 x ALE/Breakout-v5, starting ...\n")


@pytest.mark.parametrize("policy", ["torch", "jax"])
def test_the_demo_names_the_extra_of_a_missing_framework(tmp_path: Path, policy: str) -> None:
    ran = demo(tmp_path, "--policy", policy, without=policy)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f'slotloader demo needs {policy}: pip install "slotloader[gym,{policy}]"\n'


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="needs torch")
def test_the_demo_says_what_its_network_cannot_do(tmp_path: Path) -> None:
    ran = demo(tmp_path, "--policy", "torch", "--env", "Pendulum-v1", "--num-envs", "1")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.endswith(
        "slotloader demo: --policy torch: expected one Discrete action, found float32 (1,); --policy numpy takes any\n"
    )
