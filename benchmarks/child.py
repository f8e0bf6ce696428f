"""The process of one case: `python -m benchmarks.child MODULE:FUNCTION KEYWORDS RESULT`; started by the harness."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

OPTIONAL = {"slotloader", "gymnasium", "stable_baselines3", "torch", "torchrl", "tensordict", "posix_ipc"}


def main(target: str, keywords: str, result: str) -> None:
    """Calls the target and writes {"figures": ...} or {"problem": ...} to the file `result`."""
    module, function = target.split(":")
    try:
        answer = {"figures": getattr(importlib.import_module(module), function)(**json.loads(keywords))}
    except ImportError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            raise
        answer = {"problem": "not installed"}
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
