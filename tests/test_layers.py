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

# The rooms of the house, each after all that it may import. A room is a package, or a module beside them.
ROOMS = (
    "errors", "arguments", "records", "table", "messages", "worker", "fleet", "batching", "loader", "device", "learning",
    "device_batches", "adapters", "returns", "__init__", "tools",
)  # fmt: skip
THIRD_PARTY = {"numpy", "posix_ipc", "msgpack", "cloudpickle"}
FRAMEWORKS = {"torch", "jax", "grpc", "gymnasium", "dm_env", "tensorflow", "ale_py"}
# What else may be imported, and only inside a function: when somebody asks for it.
LATE = {"tools.demo": {"ale_py"}, "batching.recording": {"PIL", "imageio_ffmpeg"}}


def modules() -> dict[str, Path]:
    """Every module of the core by its name without `slotloader.`, as in `batching.former`."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "adapters":
            found[".".join(parts)] = path
    return found


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Every module that is imported, for types too, as a dotted name, and whether that happens inside a function."""

    def walk(node: ast.AST, late: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            if node.module == "slotloader":  # a room, or a name of the package itself
                yield from ((f"slotloader.{a.name}" if a.name in ROOMS else "slotloader.__init__", late) for a in node.names)
            else:
                yield str(node.module), late
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, late)

    return walk(ast.parse(source), False)


def room(module: str) -> str:
    """The room of a module that is named without `slotloader.`."""
    return module.partition(".")[0]


def broken_arrows(module: str, source: str) -> list[str]:
    """What `module` may not import."""
    own, wrong = room(module), []
    for name, late in imports(source):
        top, _, rest = name.partition(".")
        if top == "slotloader":
            target = room(rest or "__init__")
            upward = target != own and ROOMS.index(target) > ROOMS.index(own)
            wrong += [name] if upward else []
        elif top not in sys.stdlib_module_names | THIRD_PARTY and not (late and name in LATE.get(module, ())):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("module", sorted(modules()))
def test_arrows_between_rooms_point_one_way(module: str) -> None:
    assert broken_arrows(module, modules()[module].read_text()) == []


def test_every_room_has_its_place_and_every_package_says_what_it_is_for() -> None:
    assert {room(module) for module in modules()} | {"adapters"} == set(ROOMS)
    for module, path in modules().items():
        if module.endswith(".__init__"):
            purpose = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert purpose.endswith(".") and purpose.splitlines()[0] != "", f"{module}: {purpose!r}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("records.specs", "from slotloader.table.slots import Table"),
        ("records.specs", "from slotloader import table"),
        ("batching.former", "from slotloader import SlotLoader"),
        ("batching.former", "import slotloader"),
        ("records.values", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("records.values", "def f():\n    import gymnasium.spaces"),
        ("fleet.nursery", "def f():\n    from slotloader.batching.receiver import Receiver"),
        ("records.specs", "if TYPE_CHECKING:\n    from slotloader.loader import SlotLoader"),
        ("loader", "from slotloader.adapters import torch_adapter"),
        ("tools.demo", "import ale_py"),
    ],
)
def test_the_check_sees_an_arrow_that_points_the_wrong_way(module: str, source: str) -> None:
    assert broken_arrows(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batching.receiver", "from slotloader.batching.former import decide"),
        ("batching.former", "if TYPE_CHECKING:\n    from slotloader.batching.receiver import Receiver"),
        ("tools.demo", "def f():\n    import ale_py"),
    ],
)
def test_the_check_lets_a_room_keep_its_own_circles(module: str, source: str) -> None:
    assert broken_arrows(module, source) == []


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
