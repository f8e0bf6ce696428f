"""SlotLoader: the data plane between many slow environments and one policy on an accelerator."""

from typing import TYPE_CHECKING, Any

from slotloader.batching.batches import Batch
from slotloader.batching.episodes import Episode
from slotloader.batching.gatherer import BytesColumn
from slotloader.batching.meters import Dwell
from slotloader.batching.receiver import Receiver
from slotloader.batching.stats import Stats
from slotloader.device.batch import DeviceBatch
from slotloader.device.policies import Acted, Inputs, Policy, RecurrentState
from slotloader.device.run import Run
from slotloader.device.staging import BytesTensor
from slotloader.device_batches import DeviceBatches
from slotloader.errors import (
    ActionError,
    EnvFailed,
    FleetStalled,
    LeaseExpired,
    LoaderClosed,
    RecordMismatch,
    SlotLoaderError,
    SpecMismatch,
    WorkerDied,
)
from slotloader.learning.background import Background
from slotloader.learning.evaluation import EvalResult, evaluate
from slotloader.learning.learners import Transition, Transitions, Unroll, Unrolls
from slotloader.learning.returns import Advantages, VTrace
from slotloader.learning.rollouts import Rollouts
from slotloader.loader import SlotLoader
from slotloader.records.step_type import StepType
from slotloader.returns import gae, lambda_returns, n_step_returns, vtrace
from slotloader.worker.envs import EnvContext, EpisodeKey

if TYPE_CHECKING:
    from slotloader.adapters.jax_adapter import to_jax
    from slotloader.adapters.numpy_adapter import to_numpy
    from slotloader.adapters.torch_adapter import to_torch

__version__ = "0.1.0"

__all__ = [
    "Acted",
    "ActionError",
    "Advantages",
    "Background",
    "Batch",
    "BytesColumn",
    "BytesTensor",
    "DeviceBatch",
    "DeviceBatches",
    "Dwell",
    "EnvContext",
    "EnvFailed",
    "Episode",
    "EpisodeKey",
    "EvalResult",
    "FleetStalled",
    "Inputs",
    "LeaseExpired",
    "LoaderClosed",
    "Policy",
    "Receiver",
    "RecordMismatch",
    "RecurrentState",
    "Rollouts",
    "Run",
    "SlotLoader",
    "SlotLoaderError",
    "SpecMismatch",
    "Stats",
    "StepType",
    "Transition",
    "Transitions",
    "Unroll",
    "Unrolls",
    "VTrace",
    "WorkerDied",
    "__version__",
    "evaluate",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "to_jax",
    "to_numpy",
    "to_torch",
    "vtrace",
]

_ADAPTERS = {"to_jax": "jax_adapter", "to_numpy": "numpy_adapter", "to_torch": "torch_adapter"}


def __getattr__(name: str) -> Any:
    """Imports an adapter, and with it its framework, when it is first asked for."""
    if name not in _ADAPTERS:
        raise AttributeError(f"module 'slotloader' has no attribute {name!r}")
    import importlib

    extra = name.removeprefix("to_")
    try:
        module = importlib.import_module(f"slotloader.adapters.{_ADAPTERS[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(f"slotloader.{name} needs {error.name}; pip install 'slotloader[{extra}]'") from error
    return getattr(module, name)
