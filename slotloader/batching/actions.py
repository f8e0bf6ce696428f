"""Actions on their way into the table: everything is validated first, then everything is scattered."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from slotloader.errors import ActionError, SpecMismatch
from slotloader.records import values
from slotloader.records.specs import Array, Kind, Leaf, Tree, flatten, leaves, show_path, show_value

ActionBounds = Literal["ignore", "clip", "error"]


class Scatterer:
    """Checks a batch of actions.

    Args:
      tree: the action tree.
      bounds: what to do with values outside the declared bounds.
    """

    def __init__(self, tree: Tree, bounds: ActionBounds) -> None:
        if bounds not in ("ignore", "clip", "error"):
            raise ValueError(f"action_bounds: expected 'ignore', 'clip' or 'error', found {bounds!r}")
        self._tree = tree
        self._leaves = list(leaves(tree))
        self._bounds = bounds
        self._single = isinstance(tree, Leaf) and tree.kind is Kind.ARRAY

    def check(self, actions: Any, size: int) -> list[Array]:
        """Turns `actions` into one array per column, or says what is wrong with them.

        Raises:
          ActionError: wrong structure, shape, dtype or bounds.
        """
        try:
            if self._single:
                return [self._check_array(self._leaves[0], actions, size)]
            found: list[Array] = []
            for leaf, part in zip(self._leaves, flatten(self._tree, actions, ("action",)), strict=True):
                if leaf.kind is Kind.ARRAY:
                    found.append(self._check_array(leaf, part, size))
                else:
                    found.extend(_encode_rows(leaf, part, size))
            return found
        except SpecMismatch as error:
            raise ActionError(f"send refused, no env has stepped: {error}") from error

    def _check_array(self, leaf: Leaf, actions: Any, size: int) -> Array:
        shape = (size, *leaf.shape)
        if type(actions) is np.ndarray and actions.shape == shape and _fits_always(actions.dtype, leaf.dtype):
            array = actions
        else:
            array = _fit(leaf, shape, actions)
        if self._bounds == "ignore" or leaf.low is None or leaf.high is None:
            return array
        if self._bounds == "clip":
            return np.clip(array, leaf.low, leaf.high)
        outside = ~((array >= leaf.low) & (array <= leaf.high))  # NaN is outside
        if outside.any():
            row = int(np.argwhere(outside)[0][0])
            raise SpecMismatch(
                f"{show_path(leaf.path)}: expected values in [{np.min(leaf.low)}, {np.max(leaf.high)}], found "
                f"{array[outside].flat[0]} in row {row} (action_bounds='error')"
            )
        return array


@functools.lru_cache(maxsize=256)
def _fits_always(found: np.dtype[Any], expected: np.dtype[Any]) -> bool:
    """Every value of one dtype is one of the other, so that the scatter may convert it: int32 actions of jax for int64."""
    return found == expected or (found.kind in "iu" and expected.kind in "iu" and np.can_cast(found, expected))


def _fit(leaf: Leaf, shape: tuple[int, ...], actions: Any) -> Array:
    """`values.fit` for a batch, with the remedies for the usual mistakes."""
    try:
        array = np.asarray(actions)
    except Exception as error:  # a torch tensor on a device or with a gradient, a ragged list
        raise SpecMismatch(
            f"{show_path(leaf.path)}: expected {leaf.dtype} {shape}, found {type(actions).__name__} that numpy cannot read "
            f"({error}); for a torch tensor use .detach().cpu()"
        ) from error
    remedy = ""
    if array.shape == (*shape, 1):
        remedy = "; drop the last axis with actions[..., 0]"
    elif array.shape[1:] == shape[1:] and array.shape != shape:
        remedy = "; one action per record of the batch is needed, in row order"
    elif array.dtype.kind == "f" and leaf.dtype.kind in "iu":
        remedy = "; this action space is of integers: use argmax(-1) over scores, or astype(np.int64)"
    try:
        return values.fit(replace(leaf, shape=shape), array)
    except SpecMismatch as error:
        raise SpecMismatch(f"{error}{remedy}") from error


def _encode_rows(leaf: Leaf, part: Any, size: int) -> tuple[Array, Array]:
    if isinstance(part, (str, bytes)) or not hasattr(part, "__len__") or len(part) != size:
        raise SpecMismatch(f"{show_path(leaf.path)}: expected a list of {size} values, found {show_value(part)}")
    data, lengths = np.zeros((size, leaf.capacity), np.uint8), np.zeros(size, np.uint32)
    for row, value in enumerate(part):
        encoded = values.encode(leaf, value)
        data[row, : len(encoded)] = np.frombuffer(encoded, np.uint8)
        lengths[row] = len(encoded)
    return data, lengths
