"""Training online: the learner, its arrays and programs, its updates, its checkpoints."""

from etrace_bridge.learning.fit import EarlyStopping, History
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.learning.results import GradientResult, SequenceResult, StepInfo

__all__ = ["EarlyStopping", "GradientResult", "History", "OnlineLearner", "SequenceResult", "StepInfo"]
