"""`SlotWriter` writes records into slots without an env, and nothing else on the env's side stores control words."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import until
from gymnasium.spaces import Box, Dict, Discrete, Text

import slotloader
from slotloader import SlotLoader, StepType
from slotloader.errors import SpecMismatch
from slotloader.records.spaces import column_of, tree_of
from slotloader.records.specs import Array
from slotloader.table import publisher as publisher_module
from slotloader.table.layout import CONTROL, INFO_BYTES, MAX_RECEIVERS, Layout
from slotloader.table.publisher import Publisher
from slotloader.table.signals import ThreadSignal, make_fence
from slotloader.table.slots import SlotState, Table, create_private
from slotloader.table.writer import SlotWriter

SPACE = Dict({"cam": Box(0, 255, (2, 3), np.uint8), "text": Text(20, min_length=0), "x": Box(-9, 9, (), np.float32)})
INFO = {"good": np.bool_, "mask": (np.int16, (2,))}
# One episode that ends, and the beginning of the next: observation, reward, terminated, truncated, info.
FIRSTS = [(7, {"mask": np.int16([1, 2])}), (8, {})]
STEPS = [(1, 0.5, False, False, {"good": True}), (2, 2, False, False, {}), (3, np.float32(-1), True, True, {"why": "end"})]


def obs(n: int) -> dict[str, Any]:
    """An observation that tells its number."""
    return {"cam": np.full((2, 3), n, np.uint8), "text": f"number {n}", "x": np.float32(n / 2)}


class Player:
    """Plays `FIRSTS` and `STEPS`."""

    observation_space, action_space = SPACE, Discrete(5)

    def __init__(self) -> None:
        self.firsts, self.steps = iter(FIRSTS), iter(STEPS)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        n, info = next(self.firsts)
        return obs(n), info

    def step(self, action: int) -> Any:
        n, *rest = next(self.steps)
        return (obs(n), *rest)


def bare() -> tuple[Table, SlotWriter]:
    """A table of three slots in private memory, and a writer of slot 1."""
    trees = tree_of(SPACE, ("obs",)), tree_of(Discrete(5), ("action",))
    info = {name: column_of(name, declared) for name, declared in INFO.items()}
    layout = Layout.plan(3, 1, *trees, info)
    table = Table(layout, create_private(layout))
    table.end_slot[0] = 3
    publisher = Publisher(table, [ThreadSignal() for _ in range(MAX_RECEIVERS)], make_fence())
    return table, SlotWriter(table, 1, publisher)


def words_of(table: Table, slot: int) -> dict[str, Any]:
    """Everything that the slot has in a table, but for times."""
    times = {"publish_ns", "begin_ns", "step_ns", "reset_ns"}
    found: dict[str, Any] = {name: getattr(table, name)[slot].tolist() for name, _, per in CONTROL if per == "slot"}
    assert all(found[name] > 0 for name in times - {"reset_ns"} - ({"step_ns"} if not found["steps"] else set()))
    for name in (*times, "resets", "owner", "receiver"):
        del found[name]
    length = int(table.info_length[slot])
    found["progress"], found["info_data"] = table.progress[slot].tolist(), table.info_data[slot, :length].tobytes()
    for name in ("observation", "info"):
        found[name] = [column[slot].tolist() for column in getattr(table, name)]
    return found


def test_records_without_an_env_land_exactly_as_those_of_a_worker() -> None:
    found: dict[str, list[Any]] = {"worker": [], "writer": []}
    with SlotLoader(Player, 3, backend="inline", info=INFO, seed=40, timeout=None) as loader:
        for _ in range(5):
            batch = loader.recv()
            loader.table.state[1] = SlotState.READY  # as it was published
            found["worker"].append(words_of(loader.table, 1))
            loader.table.state[1] = SlotState.LEASED
            batch.send(np.zeros(3, np.int64))

    table, writer = bare()
    assert writer.is_starting()
    writer.write_first(obs(7), FIRSTS[0][1], life=0, episode=0, seed=41)
    writer.publish()
    found["writer"].append(words_of(table, 1))
    for n, *rest in STEPS:
        table.state[1] = SlotState.ACTED
        writer.begin()
        assert table.state[1] == SlotState.WRITING
        assert writer.write_step(obs(n), *rest) == (n == 3)
        assert table.state[1] == SlotState.WRITING, "a record that is not published is nobody's"
        writer.publish()
        found["writer"].append(words_of(table, 1))
    table.state[1] = SlotState.ACTED
    kept = writer.keeper()
    kept.keep(obs(8), {})  # a reset that was done ahead
    assert table.observation[0][1].tolist() == obs(3)["cam"].tolist(), "what is kept is in private memory"
    writer.begin()
    writer.write_kept(kept, life=0, episode=1, seed=None)
    writer.publish()
    found["writer"].append(words_of(table, 1))

    assert found["writer"] == found["worker"]
    last, first = found["writer"][3:]
    assert (last["step_type"], last["progress"]) == (StepType.TERMINATION, (1.5, 3, 0, 1))
    assert (first["step_type"], first["progress"], first["episode"]) == (StepType.FIRST, (0.0, 0, 0, 0), 1)
    for slot in (0, 2):
        assert not table.state[slot] and not table.observation[0][slot].any(), "only its own rows"


def test_a_real_loader_receives_records_of_a_writer_and_sends_it_actions() -> None:
    """A gateway writes as a worker does: here the loader's own worker has nothing to do with the slot."""
    with SlotLoader(Player, 2, backend="thread", num_workers=2, info=INFO, seed=0) as loader:
        first = loader.recv(min_get=2)
        assert first.size == 2
        loader.fleet._workers[1].runners[0].failed = True  # type: ignore[attr-defined]  # its worker serves it no more
        table = loader.table
        writer = SlotWriter(table, 1, Publisher(table, loader.fleet.signals, make_fence()))
        taken: list[int] = []

        def serve() -> None:
            for n, *rest in STEPS:
                until(lambda: table.state[1] == SlotState.ACTED)
                writer.begin()
                taken.append(int(table.action[0][1]))
                writer.write_step(obs(n), *rest)
                writer.publish()

        thread = threading.Thread(target=serve, name="slotloader-test-writer")
        thread.start()
        first.send([0, 1])
        kinds, sequence, episodes = [], [], []
        while len(kinds) < 3:
            batch = loader.recv()
            for row in np.flatnonzero(batch.env_indices == 1):
                kinds.append(int(batch.step_type[row]))
                sequence.append(int(batch.sequence[row]))
                assert batch.obs["text"].tolist()[row] == f"number {len(kinds)}"
                assert batch.info["good"][row] == (len(kinds) == 1)
                episodes += [episode for episode in batch.episodes if episode.slot == 1]
            batch.send([len(kinds) + 1] * batch.size)
        thread.join()
        assert loader.stats().env_steps >= 3
    assert taken == [1, 2, 3]
    assert kinds == [StepType.MID, StepType.MID, StepType.TERMINATION]
    assert sequence == [2, 3, 4], "figures go on where the worker's writer ended"
    (episode,) = episodes
    assert (episode.length, episode.episode_return, episode.info) == (3, 1.5, {"why": "end"})


def test_a_write_that_fails_publishes_nothing_and_says_what_it_found() -> None:
    table, writer = bare()
    writer.write_first(obs(7), {}, 0, 0, None)
    writer.publish()
    table.state[1] = SlotState.ACTED
    before = int(table.sequence[1])
    wrong: list[tuple[Any, str]] = [
        (({**obs(1), "cam": np.zeros(3, np.uint8)}, 0.0, False, False, {}), r'obs\["cam"\]: expected .*uint8 \(3,\)'),
        ((obs(1), "much", False, False, {}), r"reward: expected a number, found str 'much'"),
        ((obs(1), 0.0, True, False, None), r"info"),
        ((obs(1), 0.0, True, False, ["a"]), r"info"),
        ((obs(1), 0.0, False, False, {"mask": [1, 2, 3]}), r'info\["mask"\]: expected'),
    ]
    for record, text in wrong:
        writer.begin()
        with pytest.raises(SpecMismatch, match=text):
            writer.write_step(*record)
        assert table.state[1] == SlotState.WRITING and table.sequence[1] == before
    with pytest.raises(SpecMismatch, match=r'obs\["x"\]'):
        writer.keeper().keep({**obs(1), "x": "?"}, {})
    writer.put_back()
    assert table.state[1] == SlotState.ACTED


def test_an_info_that_is_no_dict_fails_its_own_env_and_no_other(how: dict[str, Any]) -> None:
    class Careless(Player):
        observation_space = Discrete(9)

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return 0, {}

        def step(self, action: int) -> Any:
            return 1, 1.0, action == 4, False, None if action == 4 else {}

    how.pop("preload", None)
    with SlotLoader(Careless, 3, on_failure="raise", **how) as loader:
        loader.recv(min_get=3).send([0, 4, 0])
        with pytest.raises(slotloader.EnvFailed, match="info: expected a dict, found NoneType None") as caught:
            loader.recv(min_get=3)
        assert caught.value.slots == (1,)
        for _ in range(5):
            loader.recv(min_get=2).send([0, 0])


def test_a_writer_goes_on_with_the_figures_of_the_one_before() -> None:
    table, writer = bare()
    for _ in range(2):
        writer.write_first(obs(7), {}, 0, 0, None)
        writer.publish()
        writer.begin()
        writer.write_step(obs(1), 1.0, False, False, {})
        writer.publish()
        writer.count_reset(5)
        writer = SlotWriter(table, 1, Publisher(table, [ThreadSignal()] * MAX_RECEIVERS, make_fence()))
    assert (table.sequence[1], table.steps[1], table.resets[1], table.reset_ns[1]) == (4, 2, 2, 10)
    assert table.step_ns[1] > 0


def test_a_claim_that_races_the_end_of_its_reset_leaves_no_slot_in_reset() -> None:
    """The claim sees the reset run, the reset ends, the claim says that it waits for it: nobody would clear that."""
    table, writer = bare()
    writer.begin_reset()
    writer.end_reset()
    table.state[1] = SlotState.ACTED
    writer.begin(resetting=True)
    assert table.resetting[1] == 1
    writer.write_first(obs(7), {}, 0, 1, None)
    writer.publish()
    assert table.resetting[1] == 0


def test_the_writer_needs_no_asyncio_no_isolation_and_nothing_of_the_workers() -> None:
    code = (
        "import sys; before = set(sys.modules); import slotloader.table.writer, slotloader.table.orders\n"
        "print([name for name in sys.modules if name.startswith('slotloader.') and not name.startswith("
        "('slotloader.table', 'slotloader.records', 'slotloader.errors'))], 'asyncio' in sys.modules)"
    )
    stub = (  # the package itself imports everything
        "import sys, types; package = types.ModuleType('slotloader'); package.__path__ = "
        f"[{str(Path(slotloader.__file__).parent)!r}]; sys.modules['slotloader'] = package\n"
    )
    ran = subprocess.run([sys.executable, "-c", stub + code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[] False\n", ran.stderr


# Who stores control words.

WORDS = {name for name, _, _ in CONTROL} | {"progress", "info_data"}
OTHERS = {  # modules of other owners that still store some themselves; has to shrink to nothing
    "fleet/local.py": {"command", "stop"},
    "fleet/process.py": {"command", "stop"},
    "fleet/supervisor.py": {"command", "owner", "resetting", "state", "stop", "end_slot"},
    "batching/leases.py": {"resetting"},
    "learning/learners.py": {"sequence"},  # a table of its own
    "loader.py": {"first_slot", "end_slot", "receiver", "paused"},
}


def stores(source: str) -> set[str]:
    """Control words that `source` stores into: `table.NAME[...] =`, `self._NAME[...] =` or `NAME_words[...] =`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        while targets:
            target = targets.pop()
            if isinstance(target, (ast.Tuple, ast.List)):
                targets += target.elts
            elif isinstance(target, ast.Subscript):
                base = target.value
                name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
                word = name.removeprefix("_").removesuffix("_words").removesuffix("_word")
                if word.startswith("progress_"):
                    word = "progress"
                if word in WORDS and (isinstance(base, ast.Attribute) or name.endswith("_words")):
                    found.add(word)
    return found


def storing() -> dict[str, set[str]]:
    """Every module outside `table/` that stores control words, with the words."""
    package = Path(slotloader.__file__).parent
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(("table/", "adapters/")) and (words := stores(path.read_text())):
            found[name] = words
    return found


def test_only_the_table_stores_control_words_on_the_envs_side() -> None:
    assert storing() == OTHERS
    assert not [name for name in OTHERS if name.startswith("worker/")]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("table.state[slot] = 3", {"state"}),
        ("self._table.resetting_words[slot] = 0", {"resetting"}),
        ("a, table.life_words[s] = 1, 2", {"life"}),
        ("self._begin_ns[slot] = now", {"begin_ns"}),
        ("x = self._reward[slot] = 0.0", {"reward"}),
        ("steps_words[slot] += 1", {"steps"}),
        ("table.progress_ended_words[slot] = 1", {"progress"}),
        ("table.info_data[slot, :3] = data", {"info_data"}),
        ("state = table.state[slot]", set()),
        ("state['a'] = 1", set()),
        ("table.owners[3] = 1", set()),
    ],
)
def test_the_check_sees_a_store(source: str, words: set[str]) -> None:
    assert stores(source) == words


def test_an_info_of_any_size_is_kept_within_its_words() -> None:
    table, writer = bare()
    writer.begin()
    assert writer.write_step(obs(1), 0.0, True, False, {"big": np.zeros(10 * INFO_BYTES), "small": 3})
    writer.publish()
    assert 0 < table.info_length[1] <= INFO_BYTES
    data: Array = table.info_data[0]
    assert not data.any(), "nor anybody else's"


class Noting:
    """Words that note when they are stored and read."""

    def __init__(self, words: Any, name: str, log: list[str]) -> None:
        self._words, self._name, self._log = words, name, log

    def __getitem__(self, at: Any) -> Any:
        self._log.append(f"read {self._name}")
        return self._words[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._log.append(f"{self._name}={int(value)}")
        self._words[at] = value


def test_stores_fences_and_loads_come_in_the_order_that_the_other_side_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(publisher_module, "make_order_fence", lambda fence: lambda: log.append("order"))
    table, _ = bare()
    publisher = Publisher(table, [ThreadSignal() for _ in range(MAX_RECEIVERS)], lambda: log.append("full"))
    writer = SlotWriter(table, 1, publisher)
    for holder, attribute, name in (
        (writer, "_state", "state"), (publisher, "_state", "state"), (publisher, "_wanted", "wanted"),
        (writer, "_resetting", "resetting"), (writer, "_begin_ns", "begin"), (writer, "_reward", "reward"),
        (writer, "_publish_ns", "publish"), (writer, "_sequence", "sequence"), (writer, "_step_type", "kind"),
    ):  # fmt: skip
        setattr(holder, attribute, Noting(getattr(holder, attribute), name, log))
    write = writer._write_observation
    writer._write_observation = lambda value: (log.append("obs"), write(value))  # type: ignore[assignment]
    writer.begin(resetting=True)
    assert [entry.partition("=")[0] for entry in log] == ["begin", "resetting", "state", "order"], "then the action is read"
    log.clear()
    writer.write_step(obs(1), 0.0, False, False, {})
    payload = len(log)
    assert "state=3" not in log and log[0] == "obs"
    writer.publish()
    assert [entry.partition("=")[0] for entry in log[payload:]] == ["sequence", "order", "state", "full", "read wanted"]
    log.clear()
    writer.begin_reset()
    writer.end_reset()
    assert [entry.partition("=")[0] for entry in log] == ["begin", "resetting"] * 2, "the time before the word that it is of"
