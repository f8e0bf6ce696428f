"""Which worker hosts some envs."""

from __future__ import annotations

from slotloader.worker.config import WorkerConfig
from slotloader.worker.lanes import ThreadedWorker
from slotloader.worker.spares import SpareWorker
from slotloader.worker.tasks import AsyncWorker
from slotloader.worker.worker import Report, Worker


def make_worker(config: WorkerConfig, report: Report, in_process: bool = False) -> Worker:
    """The worker for a configuration, with its envs not yet built."""
    if config.options.spares:
        return SpareWorker(config, report, in_process)
    return (ThreadedWorker if config.threads else Worker)(config, report, in_process)


def choose(worker: Worker) -> Worker:
    """The worker to go on with once the envs exist: the event loop if all of them are async."""
    if type(worker) is not Worker or not all(runner.is_async for runner in worker.everyone()):
        return worker
    return AsyncWorker(worker)
