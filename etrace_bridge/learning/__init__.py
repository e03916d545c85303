"""Training online: the learner, its arrays and programs, its updates, its checkpoints."""

import etrace_bridge._precision  # noqa: F401 - before anything imports brainstate
from etrace_bridge.learning.autosave import Checkpoints
from etrace_bridge.learning.early_stopping import EarlyStopping
from etrace_bridge.learning.exported import ExportedLearner, load_exported
from etrace_bridge.learning.fidelity import FidelityMeter, Reading
from etrace_bridge.learning.functional import Functional, functional
from etrace_bridge.learning.history import History
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.learning.loggers import TensorBoardLogger, WandbLogger
from etrace_bridge.learning.masks import length_mask
from etrace_bridge.learning.online_core import OnlineCarry
from etrace_bridge.learning.online_module import OnlineModule
from etrace_bridge.learning.processes import distributed_mesh
from etrace_bridge.learning.results import Discarded, GradientResult, SequenceResult, StepInfo
from etrace_bridge.learning.stream import StreamLearner

__all__ = [
    "Checkpoints",
    "Discarded",
    "EarlyStopping",
    "ExportedLearner",
    "FidelityMeter",
    "Functional",
    "GradientResult",
    "History",
    "OnlineCarry",
    "OnlineLearner",
    "OnlineModule",
    "Reading",
    "SequenceResult",
    "StepInfo",
    "StreamLearner",
    "TensorBoardLogger",
    "WandbLogger",
    "distributed_mesh",
    "functional",
    "length_mask",
    "load_exported",
]
