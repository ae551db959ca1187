"""The experiment directory: inputs, results, evidence and whether it still holds."""

from equiport.experiment.config import EquivConfig, load_config
from equiport.experiment.directory import Experiment, Freshness
from equiport.experiment.results import BackendStamp, ReasonRecord, StageResult, load_result

__all__ = [
    "BackendStamp",
    "EquivConfig",
    "Experiment",
    "Freshness",
    "ReasonRecord",
    "StageResult",
    "load_config",
    "load_result",
]
