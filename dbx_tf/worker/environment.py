"""The environment of a Spark Python worker: what it was, what is installed, which GPUs it may see.

Runs on: workers, in the Spark task; what concerns versions also on the driver.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

SET_BY_THE_RUNNER: Final = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES")
"""What MirroredStrategyRunner 1.0.0 sets in the Python worker and leaves there."""
_MLFLOW_NAMES: Final = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME")
_NOT_INHERITED: Final = (*SET_BY_THE_RUNNER, *_MLFLOW_NAMES)


def package_versions(*others: str) -> dict[str, str]:
    """Versions that have to be equal on all workers, and of others; a package that is not installed is left out."""
    versions = {"python": platform.python_version()}
    for name in ("dbx_tf", "tensorflow", "tensorflow-cpu", "keras", "tf-keras", *others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def version_differences(versions: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """The packages that both sides have in different versions; of Python, only the minor version counts."""
    found = []
    for name in sorted(versions.keys() & expected.keys()):
        pair = versions[name], expected[name]
        if name == "python":
            pair = pair[0].rpartition(".")[0], pair[1].rpartition(".")[0]
        if pair[0] != pair[1]:
            found.append(f"{name} {pair[0]} instead of {pair[1]}")
    return ", ".join(found)


def _initial_environment() -> dict[str, str]:
    """The environment this process was started with: what os.environ says now has the runner's changes in it."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name.decode(): value.decode() for name, _, value in (entry.partition(b"=") for entry in entries) if name}


def restore() -> None:
    """Take back what MirroredStrategyRunner has set: Spark uses the Python worker again for other jobs."""
    initial = _initial_environment()
    for name in SET_BY_THE_RUNNER:
        os.environ.pop(name, None)
        if name in initial:
            os.environ[name] = initial[name]


def visible(gpus: list[str]) -> list[str]:
    """Spark counts GPUs within what the executor may see: translate to the machine's own numbers or ids."""
    seen = [entry for entry in _initial_environment().get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    if not seen or any(not gpu.isdigit() or int(gpu) >= len(seen) for gpu in gpus):
        return gpus
    return [seen[int(gpu)] for gpu in gpus]


def of_training(added: Mapping[str, str], python_path: Sequence[str], gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a training process.

    Args:
        added: Variables that the driver adds.
        python_path: The driver's sys.path: what of it exists here is searched last.
        gpus: The GPUs that the process may see, as CUDA_VISIBLE_DEVICES names them.
    """
    search = [entry or str(Path.cwd()) for entry in sys.path]
    search += [entry for entry in python_path if entry not in search and Path(entry).exists()]
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED} | {
        "TF_CPP_MIN_LOG_LEVEL": "2",  # errors only: what TensorFlow says about every start hides the rest
        "PYTHONFAULTHANDLER": "1",  # a crash tells its Python stack
        **added,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus) or "-1",
        "PYTHONPATH": os.pathsep.join(search),
        "PYTHONUNBUFFERED": "1",
    }
