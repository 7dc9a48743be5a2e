"""The conformance cases: each is a small training that is run in one process and on several workers."""

from . import callbacks, datasets, fits, layers, losses, metrics, models, optimizers, saving
from .runs import run_cases
from .table import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "callbacks",
    "datasets",
    "fits",
    "layers",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "run_cases",
    "saving",
]
