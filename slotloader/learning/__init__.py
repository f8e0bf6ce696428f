"""For learners: transitions, unrolls, rollouts, returns, evaluation."""

from slotloader.learning.background import Background
from slotloader.learning.evaluation import EvalResult, evaluate
from slotloader.learning.learners import Transition, Transitions, Unroll, Unrolls
from slotloader.learning.returns import Advantages, VTrace
from slotloader.learning.rollouts import Rollouts

__all__ = [
    "Advantages",
    "Background",
    "EvalResult",
    "Rollouts",
    "Transition",
    "Transitions",
    "Unroll",
    "Unrolls",
    "VTrace",
    "evaluate",
]
