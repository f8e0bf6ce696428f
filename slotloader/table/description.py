"""What a region says about itself, in msgpack: enough for another process, or another language, to read and write it.

    {"version": 1, "num_slots": 8, "num_workers": 2,
     "fields": [["state", "|u1", [8], 64], ...],         # name, dtype (rows: a list of name and dtype), shape, offset in bytes
     "step_types": {"FIRST": 0, ...},                    # the numbers of slot states are those of the version
     "observation": tree, "action": tree, "info": tree}

A tree is `{"leaf": {...}}`, `{"dict": [[key, tree], ...]}` or `{"tuple": [tree, ...]}`. A leaf has its path, shape, dtype,
kind ("array", "text", "packed"), bounds, and the declared space in words. Its arrays are the fields named like its path,
`obs["cam"]`, for text and packed leaves with the suffixes of `values.parts`. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slotloader.records import values
from slotloader.records.specs import Kind, Leaf, Tree
from slotloader.records.step_type import StepType


def pack_description(
    fields: list[tuple[str, np.dtype[Any], tuple[int, ...], int]], trees: dict[str, Tree], **more: Any
) -> bytes:
    """Describes a region; `more` has what else is to be said, of types that msgpack knows."""
    return values.pack(
        {
            **more,
            "fields": [(name, _dtype_words(dtype), shape, offset) for name, dtype, shape, offset in fields],
            "step_types": {kind.name: int(kind) for kind in StepType},
            **{name: _pack_tree(tree) for name, tree in trees.items()},
        }
    )


def unpack_description(data: bytes) -> dict[str, Any]:
    """The way back: fields with numpy dtypes, and trees whose leaves can be gathered but neither packed nor unpacked."""
    found: dict[str, Any] = values.unpack(data)
    found["fields"] = [(name, _dtype(words), tuple(shape), offset) for name, words, shape, offset in found["fields"]]
    for name in ("observation", "action", "info"):
        found[name] = _unpack_tree(found[name])
    return found


def _dtype_words(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.fields is None else dtype.descr


def _dtype(words: Any) -> np.dtype[Any]:
    return np.dtype(words if isinstance(words, str) else [tuple(word) for word in words])


def _pack_tree(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {"dict": [(_plain(key), _pack_tree(child)) for key, child in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_pack_tree(child) for child in tree]}
    leaf = {
        "path": tuple(map(_plain, tree.path)), "shape": tree.shape, "dtype": tree.dtype.str, "kind": tree.kind.value,
        "low": tree.low, "high": tree.high, "detail": tree.detail,
    }  # fmt: skip
    return {"leaf": leaf}


def _plain(key: Any) -> Any:
    """A key as msgpack knows it; one of another type in words."""
    return key if isinstance(key, (str, int, float, bytes, bool)) or key is None else repr(key)


def _unpack_tree(data: dict[str, Any]) -> Tree:
    ((what, content),) = data.items()
    if what == "dict":
        return {key: _unpack_tree(child) for key, child in content}
    if what == "tuple":
        return tuple(_unpack_tree(child) for child in content)
    return Leaf(
        tuple(content["path"]), tuple(content["shape"]), np.dtype(content["dtype"]), Kind(content["kind"]),
        content["low"], content["high"], detail=content["detail"],
    )  # fmt: skip
