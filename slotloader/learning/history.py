"""A history of records on a device, in which learners put together what belongs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slotloader.device.ops import DeviceOps, kind_of, map_tree, structure_of
from slotloader.records.specs import Array


class History:
    """A table of `rows` records and a scratch row for padding.

    The first records make the tables; all later ones must be trees of the same structure, shapes and kinds of numbers.

    Args:
      ops: the device.
      rows: number of records.
      declared: shape and dtype of each leaf of the trees that are known beforehand, by name; the others are as they come.
    """

    def __init__(self, ops: DeviceOps, rows: int, declared: Mapping[str, Sequence[tuple[tuple[int, ...], Any]]]) -> None:
        self._ops, self._rows, self._scratch, self._declared = ops, rows + 1, rows, declared
        self._templates: dict[str, Any] = {}
        self._tables: list[Any] = []
        self._known: list[tuple[str, tuple[int, ...], Any]] = []  # of each table its name, the shape of a row, and the dtype
        self.spans: dict[str, slice] = {}  # which tables belong to a tree
        self._store = ops.jit(self._put, donate=(0,))

    def _put(self, tables: Sequence[Any], at: Any, leaves: Sequence[Any]) -> list[Any]:
        return [self._ops.put(table, at[: len(rows)], rows) for table, rows in zip(tables, leaves, strict=True)]

    def checked(self, records: dict[str, Any], size: int, bucket: int) -> list[Any]:
        """The leaves of some trees of device arrays, for `write`; nothing is changed but by the very first ones.

        Args:
          records: the trees by name.
          size: number of records.
          bucket: number of rows with padding; each leaf has so many or `size`.

        Raises:
          ValueError: names the leaf, what was expected and what was found.
        """
        templates = self._templates or records
        if records.keys() != templates.keys():
            raise ValueError(f"add: expected {', '.join(templates)}, as with the first batch, found {', '.join(records)}")
        found: list[Any] = []
        for name, template in templates.items():
            _flatten_like(template, records[name], found, name)
        known = self._known or self._describe(records)
        for leaf, (name, shape, dtype) in zip(found, known, strict=True):
            if leaf.shape[:1] not in ((size,), (bucket,)) or leaf.shape[1:] != shape:
                rows = f"({size}, ...)" if size == bucket else f"({size}, ...) or, with padding, ({bucket}, ...)"
                raise ValueError(f"add: {name}: expected {rows} and row shape {shape}, found shape {tuple(leaf.shape)}")
            if leaf.dtype != dtype and not name.startswith("action") and kind_of(leaf.dtype) != kind_of(dtype):
                raise ValueError(f"add: {name}: expected {dtype}, as with the first batch, found {leaf.dtype}")
        if not self._tables:
            self._begin(records, found, known)
        return found

    def _describe(self, records: dict[str, Any]) -> list[tuple[str, tuple[int, ...], Any]]:
        """Name, row shape and dtype of each leaf of the first records."""
        known: list[tuple[str, tuple[int, ...], Any]] = []
        for name, tree in records.items():
            named = list(_named(tree, name))
            declared = self._declared.get(name) or [(tuple(leaf.shape[1:]), leaf.dtype) for _, leaf in named]
            known.extend((path, shape, dtype) for (path, _), (shape, dtype) in zip(named, declared, strict=True))
        return known

    def _begin(self, records: dict[str, Any], found: Sequence[Any], known: list[tuple[str, tuple[int, ...], Any]]) -> None:
        ops, end = self._ops, 0
        for name, tree in records.items():
            begin, end = end, end + len(list(_named(tree, name)))
            self.spans[name] = slice(begin, end)
            own = self._declared.get(name)
            for at in range(begin, end):
                # One row, with the dtype of its array: numpy makes a text as short as it is.
                row = np.zeros(known[at][1], known[at][2]) if own else found[at][:1].reshape(found[at].shape[1:])
                self._tables.append(ops.compute(ops.table, row, self._rows))
        self._known, self._templates = known, dict(records)

    def write(self, at: Array, leaves: Sequence[Any]) -> None:
        """Stores the leaves at rows `at`; more rows than those are padding."""
        ops = self._ops
        most = max(map(len, leaves))
        if most > len(at):
            padded = np.full(most, self._scratch, np.int64)
            padded[: len(at)] = at
            at = padded
        self._tables = ops.compute(self._store, self._tables, ops.array(at), leaves)

    def read(self, function: Callable[..., Any], at: Array, *arrays: Array) -> Any:
        """`function(tables, at, *arrays)` on the device."""
        ops = self._ops
        return ops.compute(function, self._tables, ops.array(at), *(ops.array(array) for array in arrays))

    def tree(self, name: str, leaves: Sequence[Any]) -> Any:
        """The tree `name` with these leaves."""
        return rebuilt(self._templates[name], iter(leaves))


def rebuilt(template: Any, leaves: Iterator[Any]) -> Any:
    """A tree like `template` with other leaves, in the order of `leaves_of`."""
    return map_tree(lambda leaf: next(leaves), template)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of dicts, tuples and lists, in order."""
    return [leaf for _, leaf in _named(tree, "")]


def _named(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _named(child, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for at, child in enumerate(tree):
            yield from _named(child, f"{path}[{at}]")
    elif tree is not None:
        yield path, tree


def _flatten_like(template: Any, tree: Any, found: list[Any], path: str) -> None:
    """Appends the leaves of `tree` in the order of `template`, whatever the order of its keys."""
    if isinstance(template, dict):
        if not isinstance(tree, dict) or tree.keys() != template.keys():
            raise _another(path, template, tree)
        for key, child in template.items():
            _flatten_like(child, tree[key], found, path)
    elif isinstance(template, (tuple, list)):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(template):
            raise _another(path, template, tree)
        for child, other in zip(template, tree, strict=True):
            _flatten_like(child, other, found, path)
    elif template is None or tree is None or isinstance(tree, (dict, tuple, list)):
        if template is not tree:
            raise _another(path, template, tree)
    else:
        found.append(tree)


def _another(path: str, template: Any, tree: Any) -> ValueError:
    expected, found = structure_of(template), structure_of(tree)
    return ValueError(f"add: {path}: expected {expected}, as with the first batch, found {found}")
