"""GPU slots, on a Spark whose GPUs come from a stub discovery script."""

from pathlib import Path

import pytest

from .test_question import run_script

CLUSTER = "local-cluster[2,1,1024]"


@pytest.mark.parametrize(
    ("per_executor", "per_task", "num_slots", "workers", "value"),
    [("1", "1", "2", 2, "0"), ("2", "2", "4", 2, "0,1"), ("2", "2", "2", 1, "0,1")],
)
def test_slots_become_equal_workers(
    tmp_path: Path, per_executor: str, per_task: str, num_slots: str, workers: int, value: str
) -> None:
    """Each worker gets the GPUs of its task, in order, in the first run and in the second."""
    answers = run_script("gpus.py", CLUSTER, per_executor, per_task, num_slots, folder=tmp_path)
    assert answers["error"] == ""
    assert answers["runs"] == [{"value": value, "workers": workers, "each": len(value.split(","))}] * 2


@pytest.mark.parametrize(
    ("per_executor", "per_task", "num_slots", "error"),
    [
        ("1", "0.5", "2", "ClusterError: spark.task.resource.gpu.amount=0.5; it has to be a whole number"),
        ("1", "0", "2", "ClusterError: spark.task.resource.gpu.amount=0; it has to be a whole number"),
        ("2", "2", "3", "ConfigError: num_slots=3 can't be split evenly over 2 tasks of 2 GPUs each"),
        ("1", "1", "3", "ClusterError: num_slots=3 needs 3 tasks at once, but this cluster runs at most 2"),
    ],
)
def test_what_does_not_divide_is_refused(
    tmp_path: Path, per_executor: str, per_task: str, num_slots: str, error: str
) -> None:
    """Fractions, zero, uneven splits and too many slots are told before anything starts."""
    answers = run_script("gpus.py", CLUSTER, per_executor, per_task, num_slots, folder=tmp_path)
    assert answers["error"].startswith(error)
    assert answers["runs"] == []
