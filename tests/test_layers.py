"""The arrows between modules: the core needs numpy only, and each module imports only what stands before it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slotloader

PACKAGE = Path(slotloader.__file__).parent
CHECKOUT = Path(__file__).parents[1]

ORDER = (
    "errors", "arguments", "specs", "spaces", "values", "layout", "slots", "signals", "envs", "former", "stats",
    "channel", "pickling", "processes", "reports", "isolation", "runner", "workers", "buffers", "batches", "actions",
    "supervision", "fleet", "local_fleets", "worker_process", "nursery", "process_fleet", "progress", "recording",
    "receiver", "loader", "devices", "staging", "policies", "history", "learners", "rollouts", "background", "preparation",
    "completion", "device_batch", "device_batches", "returns", "evaluation", "__init__", "demo", "cli",
)  # fmt: skip
THIRD_PARTY = {"numpy", "posix_ipc", "msgpack", "cloudpickle"}
FRAMEWORKS = {"torch", "jax", "grpc", "gymnasium", "dm_env", "tensorflow", "ale_py"}
# What may be imported late, inside a function: process workers need POSIX, the command line needs a demo that is run.
LATE = {
    "loader": {"slotloader.process_fleet"},
    "cli": {"slotloader.demo"},
    "demo": {"ale_py", "slotloader.adapters.demo_torch", "slotloader.adapters.demo_jax"},
    "recording": {"PIL", "imageio_ffmpeg"},
}


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Every module that is imported at run time, as a dotted name, and whether that happens inside a function."""

    def walk(node: ast.AST, late: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                yield from walk(child, late)
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            if node.module == "slotloader":  # `from slotloader import values`: a module, or a name of the package
                yield from ((f"slotloader.{a.name}" if a.name in ORDER else "slotloader.__init__", late) for a in node.names)
            else:
                yield str(node.module), late
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, late)

    return walk(ast.parse(source), False)


def broken_arrows(module: str, source: str) -> list[str]:
    """What `module` may not import."""
    wrong = []
    for name, late in imports(source):
        top, _, rest = name.partition(".")
        if late and (top == "slotloader" or top not in THIRD_PARTY | sys.stdlib_module_names):
            wrong += [name] if name not in LATE.get(module, ()) else []
        elif top == "slotloader":
            wrong += [name] if rest not in ORDER or ORDER.index(rest) >= ORDER.index(module) else []
        elif top not in sys.stdlib_module_names | THIRD_PARTY:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    assert broken_arrows(module, (PACKAGE / f"{module}.py").read_text()) == []


def test_every_module_of_the_core_has_its_place_in_the_order() -> None:
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(ORDER)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specs", "from slotloader.slots import Table"),
        ("specs", "import slotloader.specs"),
        ("former", "from slotloader import stats"),
        ("former", "from slotloader import SlotLoader"),
        ("values", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("values", "def f():\n    import gymnasium.spaces"),
        ("receiver", "def f():\n    from slotloader.slots import Table"),
        ("loader", "from slotloader.adapters import torch_adapter"),
    ],
)
def test_the_check_sees_an_arrow_that_points_the_wrong_way(module: str, source: str) -> None:
    assert broken_arrows(module, source)


def test_the_check_lets_types_be_named_from_anywhere() -> None:
    source = "if TYPE_CHECKING:\n    from slotloader.loader import SlotLoader\nelse:\n    import slotloader.errors"
    assert [name for name, _ in imports(source)] == ["slotloader.errors"]
    assert broken_arrows("specs", source) == []


def python(source: str, cwd: Path = CHECKOUT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], cwd=cwd, capture_output=True, text=True, timeout=60)


# A finder sees what is asked for even if it is not installed, or if a `try` hides that.
WATCH = """
import sys
class Watch:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])
sys.meta_path.insert(0, Watch())
"""


def test_importing_slotloader_loads_no_framework_and_asks_for_none() -> None:
    result = python(f"{WATCH}import slotloader\nprint(sorted((Watch.asked | set(sys.modules)) & {FRAMEWORKS}))")
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_the_watch_sees_an_import_that_a_try_hides() -> None:
    result = python(f"{WATCH}try:\n    import grpc\nexcept ImportError:\n    pass\nprint('grpc' in Watch.asked)")
    assert result.stdout == "True\n"


@pytest.mark.skipif(not (CHECKOUT / "adapters").is_dir(), reason="only a checkout has a top-level folder `adapters`")
def test_adapters_are_not_imported_under_their_folder_name() -> None:
    result = python("import adapters")
    assert result.returncode == 1
    assert "ImportError: import slotloader.adapters, not adapters" in result.stderr


def test_adapters_are_imported_as_slotloader_adapters_and_load_no_framework() -> None:
    result = python(f"{WATCH}import slotloader.adapters\nprint(sorted((Watch.asked | set(sys.modules)) & {FRAMEWORKS}))")
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


# Everything that the standard library chooses by platform is imported first; then this is Windows without posix_ipc.
WINDOWS = """
import sys, asyncio, subprocess, threading, queue, tempfile, secrets, importlib, numpy, msgpack, cloudpickle
from numpy.random import SeedSequence
sys.platform = "win32"
sys.modules["posix_ipc"] = None
class Env:
    from types import SimpleNamespace as S
    observation_space = action_space = {}
    def reset(self, seed=None, options=None): return {}, {}
    def step(self, action): return {}, 1.0, False, False, {}
import slotloader
for backend in ("inline", "thread", "process"):
    try:
        with slotloader.SlotLoader(Env, num_envs=2, backend=backend) as loader:
            loader.recv(min_get=2).send({})
            print(backend, loader.recv(min_get=2).reward.tolist())
    except slotloader.SlotLoaderError as error:
        print(backend, error)
"""


def test_without_posix_ipc_threads_and_inline_work_and_processes_say_what_they_need() -> None:
    result = python(WINDOWS)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["inline [1.0, 1.0]", "thread [1.0, 1.0]"], result.stderr
    assert "backend='process' needs a POSIX system" in lines[2] and "backend='thread'" in lines[2]
    assert result.returncode == 0 and result.stderr == ""
