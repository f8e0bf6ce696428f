"""The `slotloader` command."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from slotloader import __version__
from slotloader.errors import SlotLoaderError


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="slotloader", description="Many slow RL environments, one policy.")
    parser.add_argument("--version", action="version", version=f"slotloader {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="run a fleet of real environments and explain its figures",
        description="Runs a fleet of real environments with a small policy, then prints health figures and a verdict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--env", default="ALE/Breakout-v5", help="any gymnasium id, also as module:Id")
    demo.add_argument("--policy", choices=("numpy", "torch", "jax"), default="numpy", help="the framework that acts")
    demo.add_argument("--num-envs", type=_positive, default=8)
    demo.add_argument("--num-workers", type=_positive, default=None, help="worker processes; default one per env")
    demo.add_argument("--seconds", type=_seconds, default=10.0)
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--no-progress", action="store_true", help="no bar, also on a terminal")
    arguments = parser.parse_args(argv)
    needed = ["gymnasium"] if arguments.policy == "numpy" else ["gymnasium", arguments.policy]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(["gym", *needed[1:]])
        print(f'slotloader demo needs {" and ".join(missing)}: pip install "slotloader[{extras}]"', file=sys.stderr)
        return 1
    from slotloader.tools.demo import run

    try:
        run(
            arguments.env,
            arguments.num_envs,
            arguments.seconds,
            arguments.num_workers,
            arguments.seed,
            False if arguments.no_progress else None,
            arguments.policy,
        )
    except (SlotLoaderError, ValueError, TypeError, OSError) as error:
        print(f"slotloader demo: {str(error).partition('Traceback in the worker')[0].strip()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; every environment has been closed", file=sys.stderr)
        return 130
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {number}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected more than 0, found {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
