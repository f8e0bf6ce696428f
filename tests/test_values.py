"""What is checked, rounded and packed on the way into a row and out of it (FAULTS 31 and 44 at unit level)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers_values import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    ROOT,
    columns_for,
    full_box,
    label,
    leaf,
    random_bits,
    refused,
    same,
    write_and_read,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from slotloader.errors import SpecMismatch
from slotloader.records import values
from slotloader.records.spaces import tree_of
from slotloader.records.specs import Array, flatten
from slotloader.records.values import fit_reward
from slotloader.table.infos import pack_info
from slotloader.table.layout import INFO_BYTES

SIZES = [3, 100]  # small arrays and large ones may be compared in different ways


# FAULT 31: what does not fit is refused, what fits is not altered.


@given(
    st.sampled_from((*INTEGERS, "bool")),
    st.sampled_from(NUMBERS),
    st.lists(st.integers(-(2**64), 2**64) | st.integers(-3, 3), min_size=1, max_size=3),
    st.sampled_from(SIZES),
)
@settings(max_examples=400, deadline=None)
def test_integers_arrive_unchanged_or_not_at_all(source: str, target: str, numbers: list[int], size: int) -> None:
    limits = np.iinfo(source) if source != "bool" else None
    numbers = [min(max(n, limits.min), limits.max) if limits else int(n > 0) for n in numbers]
    array = np.resize(np.array(numbers, source), size)
    try:
        found = values.fit(leaf(target, (size,)), array)
    except SpecMismatch as error:
        held = [n for n in numbers if _holds(target, n)]
        assert len(held) < len(numbers), f"{array} fits, but: {error}"
        assert re.match(rf'obs\["x"\]: expected {target} .*found {source} .*does not fit', str(error))
    else:
        assert found.dtype == target
        assert [int(n) for n in found] == [int(n) for n in array]


def _holds(dtype: str, number: int) -> bool:
    if dtype == "bool":
        return number in (0, 1)
    if dtype in INTEGERS:
        return bool(np.iinfo(dtype).min <= number <= np.iinfo(dtype).max)
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(number, object).astype(dtype)) if abs(number) < 65520 or dtype != "float16" else np.inf
    return np.isfinite(rounded) and int(rounded) == number


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "exact"), [("float16", 2**11), ("float32", 2**24), ("float64", 2**53)])
def test_an_integer_that_a_float_would_round_is_refused(dtype: str, exact: int, size: int) -> None:
    for number in (exact, -exact, exact + 2):
        assert int(values.fit(leaf(dtype, (size,)), np.full(size, number))[0]) == number
    for number in (exact + 1, -exact - 1):
        assert f"with the value {number}, which does not fit" in refused(
            values.fit, leaf(dtype, (size,)), np.full(size, number)
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_a_float_is_no_integer_not_even_a_whole_one(dtype: str, size: int) -> None:
    text = refused(values.fit, leaf(dtype, (size,)), np.ones(size, np.float32))
    assert f"expected {dtype} ({size},), found float32 ({size},)" in text


@pytest.mark.parametrize("size", SIZES)
def test_floats_round_to_the_declared_width_but_do_not_overflow(size: int) -> None:
    wide = np.full(size, 1 + 2**-30)
    assert same(values.fit(leaf("float32", (size,)), wide), wide.astype(np.float32))
    assert same(values.fit(leaf("float64", (size,)), wide.astype(np.float32)), wide.astype(np.float32).astype(np.float64))
    assert "too large" in refused(values.fit, leaf("float16", (size,)), np.full(size, 1e5, np.float32))
    assert "too large" in refused(values.fit, leaf("float32", (size,)), np.full(size, -1e39))
    infinite = np.full(size, -np.inf)
    assert same(values.fit(leaf("float32", (size,)), infinite), infinite.astype(np.float32))
    assert np.isnan(values.fit(leaf("float32", (size,)), np.full(size, np.nan))).all()


@pytest.mark.parametrize("found", [(), (1,), (3, 1), (1, 3), (4,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_the_shape_must_match_exactly_nothing_is_broadcast(found: tuple[int, ...], dtype: str) -> None:
    write = values.writer(leaf("float32"), columns_for(leaf("float32"), 1), 0, ROOT)
    text = refused(write, np.zeros(found, dtype))
    assert text.startswith('obs["x"]: expected float32 (3,), found ') and str(found) in text


NO_NUMBERS = [
    None, "a", b"a", [1, [2, 3]], [None] * 3, ["a"] * 3, object(), np.zeros(3, "M8[s]"), [2**70] * 3, {1: 2}, [1j] * 3,
]  # fmt: skip


@pytest.mark.parametrize("value", NO_NUMBERS, ids=label)
def test_what_is_no_number_is_refused_with_its_place(value: Any) -> None:
    assert 'obs["x"]: expected float32 (3,), found' in refused(values.fit, leaf(), value)


def test_a_value_that_numpy_cannot_read_is_named_with_its_place() -> None:
    class Tensor:
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("call detach() first")

    text = refused(values.fit, leaf(), Tensor())
    assert text.startswith('obs["x"]: expected float32 (3,), found Tensor') and "detach" in text


PAGE = tree_of(spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple([spaces.Discrete(3), full_box("int8", (2,))])}), ROOT)
PAIR = (1, np.zeros(2, np.int8))


@pytest.mark.parametrize(
    ("value", "place", "detail"),
    [
        ({"a": 1}, "obs", "missing ['b']"),
        ({"a": 1, "b": PAIR, "c": 1}, "obs", "extra ['c']"),
        ({"a": 1, "c": PAIR}, "obs", "missing ['b'] and extra ['c']"),
        (5, "obs", "found int 5"),
        ({"a": 1, "b": (1,)}, 'obs["b"]', "expected a tuple of 2"),
        ({"a": 1, "b": {0: 1, 1: PAIR[1]}}, 'obs["b"]', "found dict"),
        ({"a": 1, "b": (1, np.zeros(3, np.int8))}, 'obs["b"][1]', "expected int8 (2,), found int8 (3,)"),
        ({"a": 1.0, "b": PAIR}, 'obs["a"]', "expected int64 (), found float64 ()"),
    ],
    ids=label,
)
def test_a_wrong_structure_is_refused_at_the_place_where_it_is_wrong(value: Any, place: str, detail: str) -> None:
    text = refused(values.writer(PAGE, columns_for(PAGE, 1), 0, ROOT), value)
    assert text.startswith(f"{place}: ") and detail in text


class Loud:
    def __repr__(self) -> str:
        return "x" * 100_000


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


WRONG = [5, {}, None, "y" * 10_000, Loud(), Broken(), {f"other{n}" * 30: 1 for n in range(99)}]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("width", [1, 100])
def test_an_error_stays_below_one_kilobyte_whatever_is_wrong(value: Any, width: int) -> None:
    many = tree_of({f"{n}{'k' * width}": spaces.Discrete(3) for n in range(300)}, ROOT)
    refused(lambda: list(flatten(many, value, ROOT)))
    refused(values.fit, leaf(), value)
    refused(values.encode, tree_of(spaces.Text(4), ROOT), value)
    wordy = spaces.Sequence(spaces.Dict({f"key{n}": full_box("int8", (1,)) for n in range(99)}))
    refused(values.encode, tree_of(wordy, ROOT), [object()] * 999)


def test_check_refuses_nan_and_values_out_of_bounds_and_nothing_else_does() -> None:
    box = tree_of({"x": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))}, ROOT)
    columns = columns_for(box, 1)
    for x in (np.array([2, 0], np.float32), np.array([0, -1], np.float32), np.array([np.nan, 1], np.float32)):
        text = refused(values.writer(box, columns, 0, ROOT, check=True), {"x": x})
        assert text.startswith('obs["x"]: expected ') and "check=True" in text
        values.writer(box, columns, 0, ROOT)({"x": x})
        assert same(columns[0][0], x)
    values.writer(box, columns, 0, ROOT, check=True)({"x": np.array([-1, 5], np.float32)})
    unbounded = leaf("float32", (1,))
    values.writer(unbounded, columns_for(unbounded, 1), 0, ROOT, check=True)(np.array([np.inf], np.float32))


# FAULT 44 and the bits of FAULT 31: whatever the layout in memory.


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "C": lambda array: array,
    "reversed": lambda array: np.ascontiguousarray(array[::-1, :, ::-1])[::-1, :, ::-1],
    "transposed": lambda array: np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0),
    "Fortran": np.asfortranarray,
    "strided": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    "byte-swapped": lambda array: array.byteswap().view(array.dtype.newbyteorder()),
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "misaligned": lambda array: np.frombuffer(b"x" + array.tobytes(), array.dtype, offset=1).reshape(array.shape),
}


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout_arrives_bit_for_bit(layout: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    plain = random_bits(dtype, (3, 4, 2), rng) if dtype in FLOATS else rng.integers(0, 2, (3, 4, 2)).astype(dtype)
    laid = LAYOUTS[layout](plain)
    np.testing.assert_array_equal(laid, plain)
    assert same(write_and_read(leaf(dtype, (3, 4, 2)), [laid])[0], plain)


def test_a_broadcast_array_arrives_with_every_copy_of_its_value() -> None:
    value = np.broadcast_to(np.array([1, 2], np.float32), (3, 2))
    assert same(write_and_read(leaf("float32", (3, 2)), [value])[0], value.copy())


def test_lists_and_scalars_are_values_too() -> None:
    assert same(write_and_read(leaf("int16", (2,)), [[1, -2]])[0], np.array([1, -2], np.int16))
    assert same(write_and_read(leaf("int64", ()), [7])[0], np.int64(7))
    assert same(write_and_read(leaf("bool", ()), [True])[0], np.bool_(True))


def test_a_record_is_a_copy_of_what_the_env_returned_and_a_read_value_a_copy_of_the_row() -> None:
    columns = columns_for(leaf(), 1)
    buffer = np.ones(3, np.float32)
    values.writer(leaf(), columns, 0, ROOT)(buffer)
    read = values.reader(leaf(), columns, 0)
    first = read()
    buffer[:] = 5
    assert same(read(), first)
    columns[0][:] = 9
    assert first.tolist() == [1, 1, 1]


@given(st.sampled_from([*NUMBERS, "complex64", "S3", "U3", ">i4"]), st.integers(0, 3), st.booleans())
def test_packed_arrays_and_scalars_keep_dtype_shape_and_bits(dtype: str, rows: int, fortran: bool) -> None:
    rng = np.random.default_rng(rows)
    array = random_bits(dtype, (rows, 2), rng) if dtype in FLOATS else rng.integers(0, 2, (rows, 2)).astype(dtype)
    array = np.asfortranarray(array) if fortran else array
    sent = {"array": array, "scalars": tuple(array.flat), 3: None, ("a", 1): b"raw", "nest": (1, (2.5, "é"), True)}
    assert same(values.unpack(values.pack(sent)), {**sent, ("a", 1): np.bytes_(b"raw")})


# The reward, and the info of a last record.


def test_a_reward_is_any_number_that_float32_can_hold() -> None:
    assert [fit_reward(r) for r in (None, 3, True, np.float32(0.5), np.array(2), -np.inf)] == [0, 3, 1, 0.5, 2, -np.inf]
    assert np.isnan(fit_reward(np.float64("nan")))
    for wrong in ([1.0], np.zeros(1), "1", 1e39, 1j, object()):
        assert refused(fit_reward, wrong).startswith("reward: expected a number")


infos = st.dictionaries(
    st.text(max_size=60) | st.integers(-5, 5) | st.tuples(st.integers()),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=400) | st.just(object()),
        lambda child: st.lists(child, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=9), child, max_size=3),
        max_leaves=6,
    ),
    max_size=60,
)


@given(infos)
@settings(max_examples=200, deadline=None)
def test_an_info_is_bounded_and_each_key_is_kept_as_it_was_or_counted_as_dropped(info: dict[Any, Any]) -> None:
    data = pack_info(info)
    assert len(data) <= INFO_BYTES
    kept, dropped = values.unpack(data)
    assert all(key in info and info[key] == value for key, value in kept.items())
    more = re.search(r"(\d+) more", dropped[-1]) if dropped else None
    assert len(kept) + len(dropped) + (int(more[1]) - 1 if more and dropped[-1] not in info else 0) == len(info)


def test_an_info_drops_its_largest_items_and_names_them() -> None:
    info = {"big": "x" * 3000, "bigger": np.zeros(10_000), "success": True, "episode": {"r": 1.5, "l": 7}, "env": object()}
    kept, dropped = values.unpack(pack_info(info))
    assert kept == {"success": True, "episode": {"r": 1.5, "l": 7}}
    assert sorted(dropped) == ["big", "bigger", "env"]


def test_an_info_without_trouble_is_whole_up_to_the_last_byte() -> None:
    room = INFO_BYTES - len(pack_info({"a": "x" * 300})) + 300
    assert values.unpack(pack_info({"a": "x" * room})) == ({"a": "x" * room}, ())
    assert values.unpack(pack_info({"a": "x" * (room + 1)})) == ({}, ("a",))


def test_an_info_of_thousands_of_keys_is_cut_down_quickly_and_says_how_many_are_gone() -> None:
    begin = time.perf_counter()
    data = pack_info({f"key{n}": float(n) for n in range(3000)})
    assert time.perf_counter() - begin < 2.0
    kept, dropped = values.unpack(data)
    assert len(data) <= INFO_BYTES and len(kept) > 50 and "more" in dropped[-1]


@pytest.mark.parametrize("name", ["𝄞" * 60, "\ud800", "k" * 5000], ids=["four bytes each", "surrogate", "long"])
def test_no_name_of_a_key_makes_an_info_too_large_or_fails(name: str) -> None:
    info: dict[Any, Any] = {f"{n:02}{name}": object() for n in range(40)} | {f"small{n}": "x" * 50 for n in range(60)}
    data = pack_info(info)
    assert len(data) <= INFO_BYTES
    assert values.unpack(data)[0]
