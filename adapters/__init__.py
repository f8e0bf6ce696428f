"""Adapters: one framework per file, each over the core's public names.

Imported as `slotloader.adapters`, wherever the files lie.
"""

if __name__ != "slotloader.adapters":
    raise ImportError(f"import slotloader.adapters, not {__name__}: two copies of one module would not share their types")
