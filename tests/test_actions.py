"""Actions are checked whole before one is scattered (FAULT 10 at unit level)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from helpers_values import any_space, columns_for, full_box, label, same, samples
from hypothesis import given, settings
from hypothesis import strategies as st

from slotloader.batching.actions import ActionBounds, Scatterer
from slotloader.errors import ActionError
from slotloader.records import values
from slotloader.records.spaces import tree_of
from slotloader.records.specs import Array, leaves

SIDE = ("action",)
SLOTS = np.array([4, 1, 6])  # not in order: `send` may be given any


class Sender:
    """A scatterer with its table columns."""

    def __init__(self, space: Any, bounds: ActionBounds = "ignore", rows: int = 8, **max_bytes: int) -> None:
        self.tree = tree_of(space, SIDE, max_bytes)
        self.columns = columns_for(self.tree, rows)
        self.before = [column.tobytes() for column in self.columns]
        self.scatterer = Scatterer(self.tree, bounds)

    def send(self, actions: Any, slots: Array = SLOTS) -> None:
        for column, rows in zip(self.columns, self.scatterer.check(actions, slots.size), strict=True):
            column[slots] = rows

    def got(self, slot: int) -> Any:
        """The action as the env of `slot` reads it."""
        return values.reader(self.tree, self.columns, slot)()

    def refused(self, actions: Any) -> str:
        """The text of the refusal; no byte of any column has changed."""
        with pytest.raises(ActionError) as caught:
            self.send(actions)
        assert [column.tobytes() for column in self.columns] == self.before
        text = str(caught.value)
        assert text.startswith("send refused, no env has stepped: action") and len(text) < 1024
        return text


DISCRETE = spaces.Discrete(4, start=2)
ARM = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))


@pytest.mark.parametrize(
    ("actions", "found", "remedy"),
    [
        (np.array([2.0, 3.0, 2.0]), "float64 (3,)", "argmax(-1)"),
        (np.array([2, 3, 2], np.float32), "float32 (3,)", "astype(np.int64)"),
        (np.zeros((3, 4), np.float32), "float32 (3, 4)", "argmax(-1)"),
        (np.array([[2], [3], [2]]), "int64 (3, 1)", "actions[..., 0]"),
        (np.array([2, 3]), "int64 (2,)", "one action per record of the batch is needed, in row order"),
        (np.array([2, 3, 2, 2]), "int64 (4,)", "one action per record"),
        (2, "int64 ()", "one action per record"),
        (np.zeros(3, np.uint64) + 2**63, "9223372036854775808, which does not fit", ""),
        ([2, 3, None], "found", ""),
        (["a", "b", "c"], "found", ""),
        ([[1], [2, 3], []], "found list", ""),
        (None, "found", ""),
    ],
    ids=label,
)
def test_a_wrong_action_for_a_discrete_space_is_refused_with_a_remedy(actions: Any, found: str, remedy: str) -> None:
    text = Sender(DISCRETE).refused(actions)
    assert "action: expected int64 (3,)" in text and found in text and remedy in text


@pytest.mark.parametrize(
    ("actions", "remedy"),
    [
        (np.zeros((3, 2, 1), np.float32), "actions[..., 0]"),
        (np.zeros((2, 2), np.float32), "one action per record"),
        (np.zeros(2, np.float32), "expected float32 (3, 2), found float32 (2,)"),
        (np.zeros((3, 3), np.float32), "found float32 (3, 3)"),
        (np.full((3, 2), 1e39), "too large"),
        (np.zeros((3, 2), complex), "found complex128 (3, 2)"),
    ],
    ids=label,
)
def test_a_wrong_action_for_a_box_is_refused(actions: Any, remedy: str) -> None:
    assert remedy in Sender(ARM).refused(actions)


def test_a_tensor_that_numpy_cannot_read_is_refused_with_a_remedy() -> None:
    class Tensor:
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

    text = Sender(DISCRETE).refused(Tensor())
    assert "found Tensor that numpy cannot read (Can't call numpy()" in text and ".detach().cpu()" in text


def test_what_fits_is_scattered_to_its_slots_and_to_no_other() -> None:
    sender = Sender(DISCRETE)
    sender.send(np.array([5, 2, 3]))
    assert [int(sender.got(slot)) for slot in SLOTS] == [5, 2, 3]
    untouched = [slot for slot in range(8) if slot not in SLOTS]
    assert sender.columns[0][untouched].tobytes() == columns_for(sender.tree, 8)[0][untouched].tobytes()


@pytest.mark.parametrize(
    "actions",
    [
        [2, 3, 5],
        (2, 3, 5),
        np.array([2, 3, 5], np.int8),
        np.array([2, 3, 5], np.uint64),
        np.array([5, 3, 2])[::-1],
        np.array([2, 3, 5], ">i4"),
        np.array([2, 9, 3, 9, 5])[::2],
    ],
    ids=label,
)
def test_anything_that_numpy_can_read_without_changing_a_number_is_an_action(actions: Any) -> None:
    sender = Sender(DISCRETE)
    sender.send(actions)
    assert [int(sender.got(slot)) for slot in SLOTS] == [2, 3, 5]


@given(any_space, st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_an_action_of_any_space_reaches_its_env_bit_for_bit(space: Space[Any], seed: int) -> None:
    sender = Sender(space)
    records = samples(space, SLOTS.size, seed)
    sender.send(batched(space, records))
    assert all(same(sender.got(slot), record) for slot, record in zip(SLOTS, records, strict=True))


def batched(space: Any, records: list[Any]) -> Any:
    """One tree of columns out of several records, as a policy would make it."""
    if isinstance(space, spaces.Dict):
        return {key: batched(child, [record[key] for record in records]) for key, child in reversed(space.spaces.items())}
    if isinstance(space, spaces.Tuple):
        return tuple(batched(child, [record[at] for record in records]) for at, child in enumerate(space))
    if isinstance(space, (spaces.Text, spaces.Sequence, spaces.Graph, spaces.OneOf)):
        return records
    return np.stack([np.asarray(record) for record in records])


# Bounds.

OUTSIDE = np.array([[-2, 6], [0, 1], [np.inf, -np.inf]], np.float32)


def test_bounds_are_not_looked_at_by_default() -> None:
    sender = Sender(ARM)
    sender.send(OUTSIDE)
    assert same(sender.got(4), OUTSIDE[0])


def test_clip_moves_each_number_to_its_own_bound_and_leaves_the_callers_array_alone() -> None:
    sender, given_array = Sender(ARM, "clip"), OUTSIDE.copy()
    sender.send(given_array)
    assert [sender.got(slot).tolist() for slot in SLOTS] == [[-1, 5], [0, 1], [1, 0]]
    assert same(given_array, OUTSIDE)


@pytest.mark.parametrize("space", [DISCRETE, full_box("bool", (2,)), spaces.MultiBinary(3), full_box("uint64", ())], ids=label)
def test_clip_keeps_what_is_inside_for_every_kind_of_number(space: Space[Any]) -> None:
    sender, records = Sender(space, "clip"), samples(space, 3, seed=1)
    sender.send(np.stack(records))
    assert all(same(sender.got(slot), record) for slot, record in zip(SLOTS, records, strict=True))


@pytest.mark.parametrize(
    ("space", "actions", "found"),
    [
        (ARM, OUTSIDE, "found -2.0 in row 0"),
        (ARM, [[0, 0], [0, 5.5], [0, 0]], "found 5.5 in row 1"),
        (ARM, [[0, 0], [0, 0], [0, np.nan]], "found nan in row 2"),
        (DISCRETE, [2, 6, 3], "expected values in [2, 5], found 6 in row 1"),
        (DISCRETE, [2, 5, 1], "found 1 in row 2"),
        (spaces.MultiDiscrete([2, 5]), [[1, 4], [1, 5], [0, 0]], "found 5 in row 1"),
        (spaces.MultiBinary(1), [[1], [0], [2]], "found 2 in row 2"),
    ],
    ids=label,
)
def test_error_refuses_what_is_outside_and_names_value_and_row(space: Any, actions: Any, found: str) -> None:
    text = Sender(space, "error").refused(actions)
    assert found in text and "action_bounds='error'" in text


def test_error_lets_the_bounds_themselves_pass() -> None:
    sender = Sender(ARM, "error")
    sender.send([[-1, 0], [1, 5], [0, 1]])
    assert sender.got(1).tolist() == [1, 5]
    Sender(DISCRETE, "error").send([2, 5, 3])


def test_unknown_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="action_bounds: expected 'ignore', 'clip' or 'error', found 'clamp'"):
        Sender(ARM, "clamp")  # type: ignore[arg-type]


# Trees: all or nothing.

ROBOT = {"arm": ARM, "mode": spaces.Discrete(3), "say": spaces.Text(4), "path": (spaces.Sequence(spaces.Discrete(9)), DISCRETE)}
GOOD: dict[str, Any] = {
    "arm": np.ones((3, 2), np.float32),
    "mode": [0, 1, 2],
    "say": ["hi", "", "äh"],
    "path": ([(1, 2), (), (3,)], [2, 3, 4]),
}


def test_a_tree_of_actions_is_scattered_leaf_by_leaf() -> None:
    sender = Sender(ROBOT)
    sender.send(dict(reversed(GOOD.items())))
    assert sender.got(6)["say"] == "äh" and sender.got(1)["path"] == ((), 3) and int(sender.got(4)["mode"]) == 0
    assert len(sender.columns) == sum(len(values.parts(leaf)) for leaf in leaves(sender.tree)) == 7


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"arm": np.ones((3, 1), np.float32)}, 'action["arm"]: expected float32 (3, 2)'),
        ({"mode": [0, 1]}, 'action["mode"]: expected int64 (3,)'),
        ({"say": ["hi", "far too long", ""]}, 'action["say"]: expected text of at most'),
        ({"say": ["hi", b"x", ""]}, 'action["say"]: expected text'),
        ({"say": ["hi", "ho"]}, 'action["say"]: expected a list of 3 values'),
        ({"say": "abc"}, 'action["say"]: expected a list of 3 values'),
        ({"say": 5}, 'action["say"]: expected a list of 3 values'),
        ({"path": (GOOD["path"][0], [2, 3.5, 4])}, 'action["path"][1]: expected int64 (3,)'),
        ({"path": ([(1,), object(), ()], [2, 3, 4])}, 'action["path"][0]: expected packed'),
        ({"path": GOOD["path"][0]}, 'action["path"]: expected a tuple of 2'),
        ({"more": [1, 2, 3]}, "action: expected keys"),
    ],
    ids=label,
)
def test_one_wrong_leaf_keeps_every_column_as_it_was(change: dict[str, Any], text: str) -> None:
    assert text in Sender(ROBOT, say=9).refused({**GOOD, **change})


def test_a_missing_leaf_or_no_tree_at_all_keeps_every_column_as_it_was() -> None:
    assert "missing ['say']" in Sender(ROBOT).refused({key: value for key, value in GOOD.items() if key != "say"})
    assert "expected a dict with keys" in Sender(ROBOT).refused(np.zeros(3, np.int64))


def test_an_empty_send_is_a_send_of_nothing() -> None:
    sender = Sender(DISCRETE)
    sender.send(np.empty(0, np.int64), slots=np.empty(0, np.int64))
    assert [column.tobytes() for column in sender.columns] == sender.before
