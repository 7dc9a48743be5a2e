"""GPU slots, on a Spark whose GPUs come from a stub discovery script."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import connect_server, run_script

CLUSTER = "local-cluster[2,1,1024]"


def settings(folder: Path, per_executor: int, per_task: str) -> dict[str, str]:
    """Settings of a Spark that takes its executors to have so many GPUs."""
    script = folder / "discover.sh"
    addresses = ", ".join(f'"{index}"' for index in reversed(range(per_executor)))
    script.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
    script.chmod(0o755)
    return {
        "spark.ui.enabled": "false",
        "spark.worker.resource.gpu.amount": str(per_executor),
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": str(per_executor),
        "spark.executor.resource.gpu.discoveryScript": str(script),
        "spark.task.resource.gpu.amount": per_task,
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }


def run(folder: Path, per_executor: int, per_task: str, num_slots: int, kind: str = "classic") -> Any:
    """Train twice on such a Spark, through a classic session or Spark Connect."""
    conf = settings(folder, per_executor, per_task)
    if kind == "classic":
        return run_script("gpus.py", CLUSTER, json.dumps(conf), str(num_slots), folder=folder)
    with connect_server(folder, CLUSTER, conf=conf) as address:
        return run_script(
            "gpus.py", address, "", str(num_slots), folder=folder, env={"SPARK_CONNECT_MODE_ENABLED": "1"}
        )


@pytest.mark.parametrize(
    ("kind", "per_executor", "per_task", "num_slots", "workers", "value"),
    [
        ("classic", 1, "1", 2, 2, "0"),
        ("classic", 2, "2", 4, 2, "0,1"),
        ("classic", 2, "2", 2, 1, "0,1"),
        ("connect", 2, "2", 4, 2, "0,1"),
        ("connect", 1, "0.5", 2, 2, "0"),  # a resource profile asks for whole ones
    ],
)
def test_slots_become_equal_workers(
    tmp_path: Path, kind: str, per_executor: int, per_task: str, num_slots: int, workers: int, value: str
) -> None:
    """Each worker gets the GPUs of its task, in order, in the first run and in the second."""
    answers = run(tmp_path, per_executor, per_task, num_slots, kind)
    assert answers["error"] == ""
    assert answers["runs"] == [{"value": value, "workers": workers, "each": len(value.split(","))}] * 2


@pytest.mark.parametrize(
    ("per_executor", "per_task", "num_slots", "error"),
    [
        (1, "0.5", 2, "ClusterError: spark.task.resource.gpu.amount=0.5; it has to be a whole number"),
        (1, "0", 2, "ClusterError: spark.task.resource.gpu.amount=0; it has to be a whole number"),
        (2, "2", 3, "ConfigError: num_slots=3 can't be split evenly over 2 tasks of 2 GPUs each"),
        (1, "1", 3, "ClusterError: num_slots=3 needs 3 tasks at once, but this cluster runs at most 2"),
    ],
)
def test_what_does_not_divide_is_refused(
    tmp_path: Path, per_executor: int, per_task: str, num_slots: int, error: str
) -> None:
    """Fractions, zero, uneven splits and too many slots are told before anything starts."""
    answers = run(tmp_path, per_executor, per_task, num_slots)
    assert answers["error"].startswith(error)
    assert answers["runs"] == []
