"""The API page: every public name with its signature and docstring. `python -m slotloader.tools.api > docs/api.md`."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from typing import Any

import slotloader

_FRAMEWORKS = ("to_jax", "to_torch")  # importing them needs their frameworks: the page points to them instead


def page() -> str:
    """The page, as Markdown."""
    names = [name for name in slotloader.__all__ if not name.startswith("__")]
    lines = ["# Every public name", "", "Made from the docstrings by `python -m slotloader.tools.api`; do not edit.", ""]
    for name in names:
        lines += _framework(name) if name in _FRAMEWORKS else _entry(name, getattr(slotloader, name))
    return "\n".join(lines).rstrip() + "\n"


def _framework(name: str) -> list[str]:
    module = f"adapters/{name.removeprefix('to_')}_adapter.py"
    return [f"## {name}", "", f"`DeviceBatches` of a loader; arguments in `{module}`, `help(slotloader.{name})`.", ""]


def _entry(name: str, value: Any) -> list[str]:
    lines = [f"## {name}", "", "```", f"{name}{_signature(value)}", "```", "", *_text(inspect.getdoc(value)), ""]
    if inspect.isclass(value) and not issubclass(value, (BaseException, enum.Enum)):
        for method, found in _methods(value):
            first = (inspect.getdoc(found) or "").partition("\n")[0]
            head = method if isinstance(found, property) else f"{method}{_signature(found)}"
            lines.append(f"- `{head}`: {first}")
        lines.append("")
    return lines


def _signature(value: Any) -> str:
    try:
        found = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return found.replace("(self, ", "(").replace("(self)", "()")


def _text(doc: str | None) -> list[str]:
    """A docstring as a code block: it is laid out for reading as it stands."""
    return ["```", *(doc or "").splitlines(), "```"]


def _methods(value: type) -> Iterator[tuple[str, Any]]:
    for name, found in sorted(inspect.getmembers(value)):
        if not name.startswith("_") and (inspect.isfunction(found) or isinstance(found, property)):
            yield name, found


if __name__ == "__main__":
    print(page(), end="")
