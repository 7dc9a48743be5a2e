"""Whatever breaks a training: worker and cause are named, soon, nothing is left behind, and the next one works."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import HERE, run_script, scratch_folders, spark_home, training_processes
from .two_hosts import DRIVER, NEEDS_ROOT, NETWORK, two_host_cluster, two_hosts

REPEATS = int(os.environ.get("DBX_TF_FAULT_REPEATS", "1"))
SMALL = {"spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@dataclass(frozen=True)
class Told:
    """What the caller is told."""

    causes: tuple[str, ...]
    """Classes of the cause: more than one where it is chance who notices first."""
    text: str
    seconds: float
    """From the fault to the error, at most; several times what is seen."""
    error: str = "WorkerFailedError"


TABLE = {
    "raise": Told(("ValueError",), "user bug", 20),
    "kill": Told(("ProcessKilled",), "killed by signal 9", 20),
    "stop": Told(("Unresponsive", "Stalled"), "is stopped (SIGSTOP)", 60),
    "hang": Told(("Stalled",), "in on_epoch_end", 45),
    "task": Told(("TaskLost",), "the Spark task was lost", 20),
    "memory": Told(("ProcessKilled",), "memory ran out on its server", 60),
    "executor": Told(("TaskLost",), "the Spark task was lost", 20),
    "link": Told(("TaskLost", "Unresponsive"), "", 60),
    "cancel": Told(("SparkJobFailed",), "cancel", 20),
    "interrupt": Told((), "", 30, error="KeyboardInterrupt"),
}
CAN_LIMIT_MEMORY = os.geteuid() == 0 and os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK)
FROM_THE_WORKER = (
    "raise",
    "kill",
    "stop",
    "hang",
    "task",
    "cancel",
    "interrupt",
    *(["memory"] if CAN_LIMIT_MEMORY else []),
)


def check(answers: Any, faults: tuple[str, ...]) -> None:
    """Compare what happened with the table."""
    assert len(answers["broken"]) == len(faults) * REPEATS
    for broken in answers["broken"]:
        told = TABLE[broken["fault"]]
        assert broken["error"] == told.error, broken
        assert broken["seconds"] < told.seconds, broken
        assert broken["left"] == [], broken
        if told.causes:
            assert broken["cause_type"] in told.causes, broken
            assert told.text in broken["cause_message"], broken
        if told.causes and broken["fault"] != "cancel":
            assert broken["worker_index"] == broken["victim"], broken
            assert broken["host"], broken
        if broken["fault"] == "hang":
            assert "in on_epoch_end" in broken["traceback"], broken
    assert len(answers["loss"]) == 2


FULL = pytest.mark.faults


@pytest.mark.timeout(300 + 60 * REPEATS * len(TABLE))
@pytest.mark.parametrize(
    ("master", "num_workers", "faults"),
    [
        pytest.param("local[2]", 2, FROM_THE_WORKER),
        pytest.param("local[3]", 3, FROM_THE_WORKER, marks=FULL),
        pytest.param("local-cluster[2,1,1024]", 2, ("executor",)),
        pytest.param("local-cluster[2,1,1024]", 2, FROM_THE_WORKER, marks=FULL),
        pytest.param("local-cluster[3,1,1024]", 3, (*FROM_THE_WORKER, "executor"), marks=FULL),
    ],
)
def test_faults_on_one_host(master: str, num_workers: int, faults: tuple[str, ...], tmp_path: Path) -> None:
    """On one machine, with one executor and with several."""
    arguments = (master, json.dumps(SMALL), str(num_workers), ",".join(faults), str(REPEATS))
    check(run_script("faults.py", *arguments, folder=tmp_path, timeout=240 + 60 * REPEATS * len(faults)), faults)


@FULL
@pytest.mark.timeout(300)
def test_a_host_with_ipv6_addresses_alone(tmp_path: Path) -> None:
    """Spark, the channel and TensorFlow over ::1."""
    conf = {**SMALL, "spark.driver.host": "[::1]", "spark.driver.bindAddress": "::1"}
    java = os.environ.get("SPARK_SUBMIT_OPTS", "") + " -Djava.net.preferIPv6Addresses=true"
    env = {"SPARK_LOCAL_IP": "::1", "SPARK_PREFER_IPV6": "True", "SPARK_SUBMIT_OPTS": java}
    faults = ("raise", "task")
    arguments = ("local[2]", json.dumps(conf), "2", ",".join(faults), str(REPEATS))
    check(run_script("faults.py", *arguments, folder=tmp_path, env=env), faults)


@contextmanager
def settings_of_two_hosts(folder: Path) -> Iterator[tuple[str, str]]:
    """Master and settings of a cluster of two hosts, whose links can be cut."""
    with two_hosts() as links, two_host_cluster(folder, links) as cluster:
        conf = {
            **SMALL,
            "spark.driver.host": DRIVER,
            "spark.driver.bindAddress": DRIVER,
            "spark.cores.max": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "1g",
            "links": {f"{NETWORK}.1{index}": link for index, link in enumerate(links.values(), 1)},
        }
        yield cluster.master, json.dumps(conf)


@NEEDS_ROOT
@pytest.mark.timeout(300 + 120 * REPEATS * len(TABLE))
@pytest.mark.parametrize("faults", [("link",), pytest.param((*FROM_THE_WORKER, "executor"), marks=FULL)])
def test_faults_on_two_hosts(faults: tuple[str, ...], tmp_path: Path) -> None:
    """On two machines, each with its own address, of which one is cut off."""
    with settings_of_two_hosts(tmp_path / "cluster") as (master, conf):
        arguments = (master, conf, "2", ",".join(faults), str(REPEATS))
        check(run_script("faults.py", *arguments, folder=tmp_path, timeout=240 + 120 * REPEATS * len(faults)), faults)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "master",
    ["local[2]", pytest.param("", marks=FULL), pytest.param("local-cluster[2,1,1024]", marks=FULL)],
    ids=["local", "no Spark", "local-cluster"],
)
def test_a_driver_that_is_gone(master: str, tmp_path: Path) -> None:
    """Nobody is left to tell, and nothing is left: the workers notice."""
    before = set(scratch_folders())
    script = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import train_fns
from dbx_tf import Runner, Tracking
if {bool(master)}:
    from pyspark.sql import SparkSession
    SparkSession.builder.master({master!r}).config("spark.ui.enabled", "false").getOrCreate()
Runner(num_slots=2, local_mode={not master}, tracking=Tracking(enabled=False)).run(train_fns.train_for_ever)
"""
    env = {**os.environ, "SPARK_HOME": str(spark_home(tmp_path))}
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert any("replicas in sync" in line for line in driver.stdout)
    assert len(training_processes()) == 2
    driver.kill()
    driver.communicate(timeout=20)
    deadline = time.monotonic() + 20
    while (left := [*training_processes(), *(set(scratch_folders()) - before)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
