"""From declared spaces to trees, and whole records through them bit for bit (FAULTS 32, 33 and 34 at unit level)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dm_env import specs as dm
from gymnasium import Space, spaces
from helpers_values import NUMBERS, ROOT, any_space, columns_for, full_box, refused, same, samples, write_and_read
from hypothesis import given, settings
from hypothesis import strategies as st

from slotloader.records import values
from slotloader.records.spaces import DEFAULT_PACKED_BYTES, column_of, tree_of
from slotloader.records.specs import Kind, Leaf, differences, leaves, show_path, show_tree

seeds = st.integers(0, 2**31)


@given(any_space, st.sampled_from([1, 2, 5]), seeds)
@settings(max_examples=200, deadline=None)
def test_every_gymnasium_space_arrives_bit_for_bit_in_its_own_row(space: Space[Any], slots: int, seed: int) -> None:
    tree = tree_of(space, ROOT, {})
    records = samples(space, slots, seed)
    for sent, found in zip(records, write_and_read(tree, records), strict=True):
        assert same(sent, found), f"sent {sent!r}, found {found!r}"


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_every_dtype_arrives_bit_for_bit_in_a_nest_of_dicts_and_tuples(dtype: str, slots: int) -> None:
    space = spaces.Dict(
        {
            "z": full_box(dtype, ()),
            "a": spaces.Tuple([full_box(dtype, (2, 3)), spaces.Dict({"z": full_box(dtype, (1,)), "a": full_box(dtype, (4,))})]),
        }
    )
    records = samples(space, slots, seed=slots)
    assert all(map(same, records, write_and_read(tree_of(space, ROOT), records)))


@given(any_space, seeds)
@settings(max_examples=60, deadline=None)
def test_what_is_read_back_lies_in_the_space_that_it_was_declared_with(space: Space[Any], seed: int) -> None:
    """So an env gets actions that its own `action_space.contains`. Graphs come back as a named tuple of the same fields."""
    if "Graph" in str(space):
        return
    space.seed(seed)
    assert space.contains(write_and_read(tree_of(space, ROOT), [space.sample()])[0])


ARM = dm.BoundedArray((2,), np.float32, -1.0, [1.0, 2.0], name="arm")
DM_SPECS: dict[str, Any] = {
    "Array": dm.Array((2, 3), np.float64),
    "scalar Array": dm.Array((), np.int16),
    "BoundedArray": ARM,
    "DiscreteArray": dm.DiscreteArray(7),
    "dict": {"b": ARM, "a": dm.Array((1,), bool)},
    "nested list": [dm.Array((3,), np.uint8), {"x": dm.DiscreteArray(2)}],
}


@pytest.mark.parametrize("name", DM_SPECS)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_every_dm_env_spec_round_trips(name: str, slots: int) -> None:
    def value(spec: Any) -> Any:
        if isinstance(spec, dict):
            return {key: value(spec[key]) for key in reversed(spec)}
        return tuple(map(value, spec)) if isinstance(spec, list) else spec.generate_value()

    records = [value(DM_SPECS[name])] * slots
    assert all(map(same, records, write_and_read(tree_of(DM_SPECS[name], ROOT), records)))


def test_a_dm_env_text_round_trips() -> None:
    assert write_and_read(tree_of(dm.StringArray(()), ROOT), ["", "né"]) == ["", "né"]


def bounds(leaf: Any) -> tuple[Any, Any]:
    return leaf.low.tolist(), leaf.high.tolist()


def test_bounds_come_from_the_space() -> None:
    assert bounds(tree_of(spaces.Discrete(4, start=-2), ROOT)) == (-2, 1)
    assert bounds(tree_of(spaces.MultiDiscrete([2, 5], start=[1, 7]), ROOT)) == ([1, 7], [2, 11])
    assert bounds(tree_of(spaces.MultiDiscrete([4, 4]), ROOT)) == (0, 3)
    assert bounds(tree_of(spaces.MultiBinary((2, 2)), ROOT)) == (0, 1)
    assert bounds(tree_of(spaces.Box(np.array([0, -1]), np.array([2, 2]), dtype=np.int8), ROOT)) == ([0, -1], 2)
    assert bounds(tree_of(dm.DiscreteArray(7), ROOT)) == (0, 6)
    assert bounds(tree_of(ARM, ROOT)) == (-1, [1, 2])
    assert tree_of(dm.Array((2,), np.float32), ROOT).low is None


def test_bounds_of_a_pixel_space_cost_one_number() -> None:
    leaf = tree_of(spaces.Box(0, 255, (1080, 1920, 3), np.uint8), ROOT)
    assert leaf.low.size == leaf.high.size == 1


def test_leaves_have_native_byte_order() -> None:
    assert tree_of(dm.Array((2,), ">f4"), ROOT).dtype == np.dtype("=f4")
    assert column_of("x", ">f4").dtype.isnative


def test_subclasses_and_plain_containers_are_spaces_too() -> None:
    class Pixels(spaces.Box):
        pass

    tree = tree_of({"cam": Pixels(0, 255, (2,), np.uint8), "more": [spaces.Discrete(3)]}, ROOT)
    assert [show_path(leaf.path) for leaf in leaves(tree)] == ['obs["cam"]', 'obs["more"][0]']


def test_keys_that_are_no_strings_are_matched_all_the_same() -> None:
    space = spaces.Dict({1: spaces.Discrete(5), 2: spaces.Discrete(5, start=10)})
    records = [{2: np.int64(11), 1: np.int64(4)}]
    found = write_and_read(tree_of(space, ROOT), records)[0]
    assert sorted(found.values()) == [4, 11]


class Home(Space[Any]):
    """A space that nobody knows."""


Box = type("Box", (), {"shape": (2,), "dtype": np.dtype("f4"), "low": 0, "high": 1})


@pytest.mark.parametrize(
    "space",
    [Home(), Box(), object(), None, 3, dm.Array((2,), object), dm.StringArray((3,))],
    ids=lambda space: type(space).__name__,
)
def test_an_unsupported_space_is_a_type_error_that_names_place_and_type(space: Any) -> None:
    with pytest.raises(TypeError, match=r'^obs\["in"\]\[0\]: expected .*found') as caught:
        tree_of({"in": (space,)}, ROOT)
    assert len(str(caught.value)) < 1024


def test_capacity_is_the_longest_text_in_utf8() -> None:
    assert tree_of(spaces.Text(7, charset="abc"), ROOT).capacity == 7
    assert tree_of(spaces.Text(7, charset="ab𝄞"), ROOT).capacity == 28
    assert tree_of(spaces.Sequence(spaces.Discrete(2)), ROOT).capacity == DEFAULT_PACKED_BYTES


def test_max_bytes_goes_by_dotted_path_first_and_then_by_key() -> None:
    page = spaces.Dict({"html": spaces.Text(5), "links": spaces.Sequence(spaces.Discrete(2))})
    tree = tree_of(spaces.Dict({"page": page, "html": spaces.Text(5)}), ROOT, {"html": 100, "page.html": 200, "links": 300})
    found = {show_path(leaf.path): leaf.capacity for leaf in leaves(tree)}
    assert found == {'obs["page"]["html"]': 200, 'obs["page"]["links"]': 300, 'obs["html"]': 100}


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r'max_bytes for obs\["html"\].*found 0'):
        tree_of({"html": spaces.Text(5)}, ROOT, {"html": 0})


def test_an_info_column_is_a_dtype_a_pair_or_a_space() -> None:
    assert str(column_of("x", np.bool_)) == "bool ()"
    assert str(column_of("x", "float32")) == "float32 ()"
    assert str(column_of("x", (np.int8, (2, 3)))) == "int8 (2, 3)"
    assert str(column_of("x", spaces.MultiBinary(4))) == "int8 (4,)"
    assert column_of("x", np.float32).path == ("info", "x")
    assert column_of("msg", spaces.Text(5, charset="ab")).kind is Kind.TEXT


@pytest.mark.parametrize("declared", [str, object, None, "nonsense", (np.float32, 5), np.dtype([("a", "f4")])], ids=str)
def test_an_info_column_without_a_fixed_numeric_type_is_a_type_error_that_names_it(declared: Any) -> None:
    with pytest.raises(TypeError, match="success"):
        column_of("success", declared)


@given(any_space)
@settings(max_examples=50, deadline=None)
def test_equal_spaces_do_not_differ(space: Space[Any]) -> None:
    assert list(differences(tree_of(space, ROOT), tree_of(space, ROOT), ROOT)) == []


BOX = spaces.Box(0, 1, (2,), np.float32)
PAIRS: dict[str, tuple[Any, Any, str]] = {
    "shape": (BOX, spaces.Box(0, 1, (3,), np.float32), "(2,).*(3,)"),
    "dtype": (BOX, spaces.Box(0, 1, (2,), np.float64), "float32.*float64"),
    "bounds": (BOX, spaces.Box(0, 2, (2,), np.float32), "0.0, 1.0.*0.0, 2.0"),
    "start": (spaces.Discrete(3), spaces.Discrete(3, start=1), "0, 2.*1, 3"),
    "keys": (spaces.Dict({"a": BOX}), spaces.Dict({"b": BOX}), "'a'.*'b'"),
    "length": (spaces.Tuple([BOX]), spaces.Tuple([BOX, BOX]), "against"),
    "container": (spaces.Tuple([BOX]), spaces.Dict({"a": BOX}), "against"),
    "kind": (spaces.Text(5), BOX, "text.*float32"),
    "capacity": (spaces.Text(5), spaces.Text(6), "5 bytes.*6 bytes"),
    "zero size": (spaces.Box(0, 1, (0,)), spaces.Box(0, 1, (0, 2)), "(0,).*(0, 2)"),
    "packed kinds": (spaces.Sequence(spaces.Discrete(3)), spaces.Graph(spaces.Discrete(3), None), "against"),
    "packed items": (spaces.Sequence(spaces.Discrete(3)), spaces.Sequence(BOX), "against"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_difference_between_two_spaces_names_the_place_and_shows_both(name: str) -> None:
    first, second, shown = PAIRS[name]
    wrap = [tree_of({"same": BOX, "it": space}, ROOT) for space in (first, second)]
    (line,) = differences(*wrap, ROOT)
    assert line.startswith('obs["it"]: ')
    assert re.search(shown.replace("(", r"\(").replace(")", r"\)"), line), line


def test_a_tree_of_any_size_is_shown_on_one_line() -> None:
    tree = {"a": tree_of(spaces.Box(0, 1, (0,)), ROOT), "b": (Leaf(ROOT, (), np.dtype("i4")),)}
    assert show_tree(tree).count("\n") == 0


# FAULT 34: texts and packed values, up to their capacity and not one byte more.

VALUES: dict[str, tuple[Any, Any]] = {
    "Text": (spaces.Text(99, charset="ab"), "ab" * 20),
    "Text in UTF-8": (spaces.Text(99, charset="é𝄞"), "é𝄞" * 9),
    "Sequence": (spaces.Sequence(full_box("float32", (2,))), (np.ones(2, np.float32), np.zeros(2, np.float32))),
    "Graph": (
        spaces.Graph(full_box("float32", (2,)), None),
        spaces.GraphInstance(np.ones((3, 2), np.float32), None, np.array([[0, 1]])),
    ),
    "OneOf": (spaces.OneOf([spaces.Discrete(3), full_box("int8", (4,))]), (np.int64(1), np.ones(4, np.int8))),
}
PLACES: dict[str, Callable[[Any], tuple[Any, Callable[[Any], Any]]]] = {
    "root": lambda space: (space, lambda value: value),
    "dict": lambda space: ({"it": space}, lambda value: {"it": value}),
    "deep": lambda space: ({"page": {"it": space}}, lambda value: {"page": {"it": value}}),
    "tuple": lambda space: ((spaces.Discrete(2), space), lambda value: (0, value)),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_one_byte_too_many_is_an_error_whose_remedy_works(name: str, place: str) -> None:
    (space, wrap), value = PLACES[place](VALUES[name][0]), VALUES[name][1]
    only = next(leaf for leaf in leaves(tree_of(space, ROOT)) if leaf.kind is not Kind.ARRAY)
    size = len(values.encode(only, value))
    key = {"root": "obs", "dict": "it", "deep": "page.it", "tuple": "1"}[place]
    text = refused(lambda: write_and_read(tree_of(space, ROOT, {key: size - 1}), [wrap(value)]))
    shown = {"root": "obs", "dict": 'obs["it"]', "deep": 'obs["page"]["it"]', "tuple": "obs[1]"}[place]
    assert text.startswith(f"{shown}: expected ") and f"at most {size - 1} bytes" in text and f"found {size} bytes" in text
    remedy = re.search(r"max_bytes=(\{.*\})", text)
    assert remedy, text
    assert same(write_and_read(tree_of(space, ROOT, eval(remedy[1])), [wrap(value)])[0], wrap(value))


def test_what_is_left_of_a_longer_text_is_not_seen() -> None:
    tree = tree_of(spaces.Text(9), ROOT)
    columns = columns_for(tree, 1)
    write, read = values.writer(tree, columns, 0, ROOT), values.reader(tree, columns, 0)
    for text in ("abcdefghi", "z", ""):
        write(text)
        assert read() == text


@pytest.mark.parametrize("value", [b"abc", 5, None, ["a"]], ids=repr)
def test_only_a_str_is_a_text(value: Any) -> None:
    assert "expected text" in refused(values.encode, tree_of(spaces.Text(9), ROOT), value)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


UNPACKABLE = [[object()], [2**70], [np.zeros(2, object)], endless(), [lambda: 0]]


@pytest.mark.parametrize("value", UNPACKABLE, ids=lambda value: type(value[0]).__name__)
def test_what_cannot_be_packed_is_refused_with_its_place(value: Any) -> None:
    assert refused(values.encode, tree_of(spaces.Sequence(spaces.Discrete(2)), ROOT), value).startswith("obs: expected packed")


def test_a_graph_is_packed_from_its_fields_and_nothing_else() -> None:
    assert "obs: expected packed" in refused(values.encode, tree_of(spaces.Graph(spaces.Discrete(2), None), ROOT), (1, 2, 3))
