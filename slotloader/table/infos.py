"""The info dict of a last record as bytes of a fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotloader.errors import SpecMismatch
from slotloader.records import values
from slotloader.records.specs import show_value
from slotloader.table.layout import INFO_BYTES

_DROPPED_BYTES = 600  # room for the names of what an info had to leave out


def require_info(info: Any) -> None:
    """Refuses an info that is no dict.

    Raises:
      SpecMismatch: it is something else.
    """
    if type(info) is not dict and not isinstance(info, Mapping):
        raise SpecMismatch(f"info: expected a dict, found {show_value(info)}")


def pack_info(info: Mapping[str, Any]) -> bytes:
    """The info of a last record in at most `INFO_BYTES`: what cannot be packed or does not fit is named, not sent.

    Returns:
      msgpack of `(info, dropped)`: the smallest values are kept, `dropped` names what was left out, shortened if long.

    Raises:
      SpecMismatch: `info` is no dict.
    """
    require_info(info)
    try:
        data = values.pack((info, ()))
        if len(data) <= INFO_BYTES:
            return data
    except (TypeError, ValueError, OverflowError):
        pass
    sizes: dict[Any, int] = {}
    dropped: list[str] = []
    for key, value in info.items():
        try:
            sizes[key] = len(values.pack((key, value)))
        except (TypeError, ValueError, OverflowError):
            dropped.append(str(key))
    kept, room = set(), INFO_BYTES - _DROPPED_BYTES
    for key in sorted(sizes, key=lambda key: sizes[key]):
        room -= sizes[key]
        if room < 0:
            dropped.append(str(key))
        else:
            kept.add(key)
    names = [_short_name(name) for name in dropped[:16]]
    if len(dropped) > len(names):
        names.append(f"... and {len(dropped) - len(names)} more")
    return values.pack(({key: info[key] for key in info if key in kept}, names))


def _short_name(name: str) -> str:
    """At most 24 bytes of a key, whatever characters it is made of."""
    return name.encode("utf-8", "backslashreplace")[:24].decode("utf-8", "ignore")
