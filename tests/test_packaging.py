"""What users install is what lies here: sdist -> wheel -> a clean environment."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist, as an index would build it."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    (found,) = out.glob("*.whl")
    return found


def sources(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_core_and_of_the_adapters(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.startswith("slotloader/")}
    core = {
        f"slotloader/{name}": data for name, data in sources(ROOT / "slotloader").items() if not name.startswith("adapters")
    }
    adapters = {f"slotloader/adapters/{name}": data for name, data in sources(ROOT / "adapters").items()}
    assert packed == core | adapters


def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True, system_site_packages=False)
    python = tmp_path / "env" / "bin" / "python"
    dependencies = [str(Path(sys.modules[name].__file__ or "").parent.parent) for name in ("pytest",)]
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=100)
    script = f"""
import sys
sys.path.append({dependencies[0]!r})  # numpy and the like, behind the environment's own packages
import slotloader, slotloader.adapters
assert slotloader.__file__.startswith({str(tmp_path)!r}), slotloader.__file__
class Env:
    from gymnasium import spaces
    observation_space = action_space = spaces.Discrete(3)
    def reset(self, seed=None, options=None): return 0, {{}}
    def step(self, action): return 1, 1.0, True, False, {{}}
with slotloader.SlotLoader(Env, 2) as loader:
    batch = loader.recv(min_get=2)
    batch.send([0, 0])
    print("works", slotloader.__version__)
"""
    ran = subprocess.run([str(python), "-c", script], check=False, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ran.stdout.startswith("works"), ran.stderr
    entry = subprocess.run(
        [str(tmp_path / "env" / "bin" / "slotloader"), "--help"],
        env={"PYTHONPATH": dependencies[0]}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "demo" in entry.stdout
