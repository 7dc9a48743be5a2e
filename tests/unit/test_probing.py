"""What is made of what the workers told."""

from dataclasses import replace
from typing import Any

import pytest

from dbx_tf.driver.probing import judge
from dbx_tf.errors import ArgumentProblem
from dbx_tf.worker.probe import Finding

VERSIONS = {"python": "3.12.3", "tensorflow": "2.21.0", "keras": "3.15.1", "protobuf": "6.33.0"}
GOOD = Finding(
    worker_index=0,
    host="a",
    executor="0",
    versions=VERSIONS,
    place_error="",
    tensorflow_error="",
    num_gpus=0,
    free_disk_bytes=1 << 40,
    scratch_dir="/local_disk0",
    peer_error="",
    driver_error="",
    missing_paths=[],
)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"versions": {**VERSIONS, "keras": "3.5.0"}}, "keras 3.5.0 instead of 3.15.1"),
        ({"versions": {**VERSIONS, "protobuf": "5.29.3"}}, "protobuf 5.29.3 instead of 6.33.0"),
        ({"versions": {"python": "3.12.9"}, "tensorflow_error": "no module"}, "can't import TensorFlow (no module)"),
        ({"num_gpus": 1}, "TensorFlow sees 1 GPUs on worker 1 on host b, not the 0 of its task"),
        ({"place_error": "Spark gave this task the GPUs []"}, "worker 1 on host b: Spark gave"),
        ({"peer_error": "worker 1 can't reach worker 0; they connect; open the network"}, "can't reach worker 0"),
        ({"driver_error": "no route"}, "can't reach the driver (no route)"),
        ({"free_disk_bytes": 1 << 30}, "1.0 GiB free in /local_disk0"),
        ({"missing_paths": ["/local_disk0/data"]}, "worker 1 on host b does not see /local_disk0/data"),
    ],
)
def test_what_a_worker_lacks_is_told(changes: dict[str, Any], text: str) -> None:
    """One worker lacks something: one problem, which names it and what to do."""
    findings = [GOOD, replace(GOOD, **{"worker_index": 1, "host": "b", **changes})]
    (problem,) = judge(findings, VERSIONS, 0, 1)
    assert text in problem.what
    assert problem.possible
    assert problem.fix
    assert isinstance(problem, ArgumentProblem) == ("missing_paths" in changes)


def test_workers_that_lack_nothing_are_not_told() -> None:
    """Two good workers on two hosts have no problem, on one host only where two are required."""
    there = [GOOD, replace(GOOD, worker_index=1, host="b")]
    assert list(judge(there, VERSIONS, 0, 2)) == []
    (problem,) = judge([GOOD, replace(GOOD, worker_index=1)], VERSIONS, 0, 2)
    assert "the workers landed on 1 host;" in str(problem)
    assert "spark.task.cpus" in problem.fix


def test_all_is_told_at_once() -> None:
    """Whatever is wrong on any worker comes in one go."""
    bad = replace(GOOD, tensorflow_error="broken", free_disk_bytes=0, driver_error="no route")
    assert len(list(judge([bad, replace(bad, worker_index=1)], VERSIONS, 0, 1))) == 6
