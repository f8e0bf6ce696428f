"""Benchmarks of SlotLoader: one file per question, run as `python -m benchmarks.NAME [--quick] [--json PATH]`."""
