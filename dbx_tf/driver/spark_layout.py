"""How a run would fit on the Spark session: tasks, GPUs, and what its settings forbid.

Runs on: driver.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dbx_tf.cluster import SlotLayout, layout_slots
from dbx_tf.driver.launch import Launcher
from dbx_tf.driver.spark_launch import ConnectLauncher, SparkLauncher
from dbx_tf.errors import Problem

_REGISTRATION_SECONDS: Final = 30.0
"""So long after an application's start executors may still come (spark.scheduler.maxRegisteredResourcesWaitingTime)."""


@dataclass(frozen=True, slots=True)
class SparkLayout:
    """How a run would fit on a Spark session."""

    slots: SlotLayout
    available: int | None = None
    """Tasks the cluster can run at once (count); None if it was not asked."""
    launcher: Launcher | None = None
    num_hosts: int | None = None
    """Hosts with executors (count); None if the session does not tell."""


def lay_out(num_slots: int, use_gpu: bool | None, gpu_resource_name: str, problems: list[Problem]) -> SparkLayout:
    """Ask the active Spark session, or a new one where there is none, and add what stands in the way to `problems`.

    Raises:
        ConfigError: If the slots can't be spread evenly over tasks.
    """
    nothing = SparkLayout(SlotLayout(num_slots, 0))
    if importlib.util.find_spec("pyspark") is None:
        problems.append(
            Problem(
                "error",
                "pyspark is not installed",
                "workers are Spark tasks, or processes on this machine",
                "install dbx-tf[spark], or use local_mode=True",
            )
        )
        return nothing
    session = _open_session()
    problems += _check_spark(session)
    gpus = _find_gpus(session, num_slots, use_gpu, gpu_resource_name)
    if isinstance(gpus, Problem):
        problems.append(gpus)
        return nothing
    layout = layout_slots(num_slots, gpus.per_task)
    available = _wait_for_slots(session, gpus, layout.num_tasks)
    if layout.num_tasks > available:
        problems.append(
            Problem(
                "error",
                f"num_slots={num_slots} needs {layout.num_tasks} tasks at once, but this cluster runs at most "
                f"{available} (spark.task.cpus={session.get('spark.task.cpus') or 1})",
                "Spark would wait ten minutes for more; possible is num_slots up to "
                f"{available * max(gpus.per_task, 1)}",
                "lower num_slots, add servers, or wait until all servers have started",
            )
        )
    return SparkLayout(layout, available, session.make_launcher(layout.num_tasks, gpus), session.count_hosts())


@dataclass(frozen=True, slots=True)
class _Gpus:
    """GPUs of a task."""

    per_task: int
    """Count; 0 to train on CPUs."""
    resource_name: str
    needs_profile: bool = False
    """True if the session's own settings don't give a task so many."""


class _Session(ABC):
    """What is asked of a Spark session."""

    def __init__(self, spark: Any) -> None:
        self.spark = spark

    @abstractmethod
    def get(self, key: str) -> str | None:
        """A setting of the Spark application."""

    @abstractmethod
    def count_slots(self, gpus: _Gpus) -> int:
        """Tasks that can run at once."""

    @abstractmethod
    def count_hosts(self) -> int | None:
        """Hosts that have executors; None if that is not to be seen."""

    @abstractmethod
    def make_launcher(self, num_tasks: int, gpus: _Gpus) -> Launcher:
        """What starts so many tasks."""

    @property
    def is_local(self) -> bool:
        """True if all tasks run in the driver's JVM."""
        return (self.get("spark.master") or "").startswith("local[")


class _ClassicSession(_Session):
    def __init__(self, spark: Any) -> None:
        super().__init__(spark)
        self._context = spark.sparkContext
        self._conf = self._context.getConf()

    def get(self, key: str) -> str | None:
        value: str | None = self._conf.get(key, None)
        return value

    def count_slots(self, gpus: _Gpus) -> int:
        """As Spark's own barrier check counts them (private, Spark 4.3; 5 ms)."""
        try:
            jvm = self._context._jsc.sc()
            return int(jvm.maxNumConcurrentTasks(jvm.resourceProfileManager().defaultResourceProfile()))
        except Exception:  # noqa: BLE001  # py4j raises its own errors where a cluster hides these methods
            return int(self._context.defaultParallelism) // int(self.get("spark.task.cpus") or 1)

    def count_hosts(self) -> int | None:
        """From Spark's status tracker, in which the driver counts as an executor."""
        if self.is_local:
            return 1
        try:
            jvm = self._context._jsc.sc()
            own = self._context._jvm.org.apache.spark.SparkEnv.get().blockManager().blockManagerId().port()
            executors = [(info.host(), info.port()) for info in jvm.statusTracker().getExecutorInfos()]
        except Exception:  # noqa: BLE001  # as in count_slots
            return None
        driver = self.get("spark.driver.host")
        return len({host for host, port in executors if (host, port) != (driver, own)}) or None

    def make_launcher(self, num_tasks: int, gpus: _Gpus) -> Launcher:
        return SparkLauncher(self.spark, num_tasks)


class _ConnectSession(_Session):
    def get(self, key: str) -> str | None:
        value: str | None = self.spark.conf.get(key, None)
        return value

    def count_slots(self, gpus: _Gpus) -> int:
        """From the partitions that Spark would give a range: one for each core of the executors (no job is run).

        How many executors they belong to is not to be seen here, unless their size is set: then GPUs count too.
        """
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.spark.range(1).explain(extended=True)
        found = re.search(r"splits=Some\((\d+)\)", out.getvalue())
        cores = int(found.group(1)) if found else sys.maxsize  # Spark itself checks when the job starts
        of_task = int(self.get("spark.task.cpus") or 1)
        of_executor = int(self.get("spark.executor.cores") or 0)
        if not of_executor:
            return cores // of_task
        slots = of_executor // of_task
        if gpus.per_task:
            has = int(self.get(f"spark.executor.resource.{gpus.resource_name}.amount") or 0)
            slots = min(slots, has // gpus.per_task)
        return slots * (cores // of_executor)

    def count_hosts(self) -> int | None:
        """Not to be seen but with a local master."""
        return 1 if self.is_local else None

    def make_launcher(self, num_tasks: int, gpus: _Gpus) -> Launcher:
        if not gpus.needs_profile:
            return ConnectLauncher(self.spark, num_tasks)
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        task = TaskResourceRequests().cpus(int(self.get("spark.task.cpus") or 1))
        task = task.resource(gpus.resource_name, gpus.per_task)
        profile = ResourceProfileBuilder().require(task).build
        _ = profile.id  # Spark registers it now: in the launcher's thread, no session is active
        return ConnectLauncher(self.spark, num_tasks, profile)


def _open_session() -> _Session:
    """The active session, or a new one."""
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    return _ConnectSession(session) if is_remote() else _ClassicSession(session)


def _check_spark(session: _Session) -> Iterator[Problem]:
    if _is_true(session.get("spark.dynamicAllocation.enabled")) and not session.is_local:
        yield Problem(
            "error",
            "spark.dynamicAllocation.enabled=true",
            "workers that train together need a cluster of fixed size (Spark's barrier mode, SPARK-24942)",
            "set it to false in the cluster's Spark config",
        )
    ignored = _is_true(session.get("tensorflow.spark.distributor.ignoreSsl"))
    if _is_true(session.get("spark.ssl.enabled")) and not ignored:
        yield Problem(
            "error",
            "spark.ssl.enabled=true",
            "TensorFlow sends gradients between the workers without encryption",
            "if your network allows that, set tensorflow.spark.distributor.ignoreSsl=true in the Spark config",
        )


def _is_true(value: str | None) -> bool:
    return value is not None and value.strip().lower() == "true"


def _find_gpus(session: _Session, num_slots: int, use_gpu: bool | None, name: str) -> _Gpus | Problem:
    """The GPUs of each task, or why they can't be used."""
    key = f"spark.task.resource.{name}.amount"
    amount, of_executor = session.get(key), session.get(f"spark.executor.resource.{name}.amount")
    if use_gpu is False or (use_gpu is None and amount is None):
        return _Gpus(0, name)
    number = _whole_number(amount)
    if number:
        return _Gpus(number, name)
    if isinstance(session, _ConnectSession) and (number := _whole_number(of_executor)):
        return _Gpus(math.gcd(num_slots, number), name, needs_profile=True)
    if amount == "0" and use_gpu is None:
        return _Gpus(0, name)
    fix = f"set {key} to 1, or to the GPUs of one server for one worker each, in the cluster's Spark config; "
    fix += "or train on CPUs with use_gpu=False"
    if amount is not None:
        whole = "it has to be a whole number from 1: a worker has its GPUs to itself"
        return Problem("error", f"{key}={amount}", whole, fix)
    what = f"use_gpu=True, but {key} is not set: this cluster does not schedule GPUs"
    confs = "spark.executor.resource.gpu.amount=1, spark.executor.resource.gpu.discoveryScript=/path/to/script "
    confs += '(it prints {"name": "gpu", "addresses": ["0"]}); a GPU cluster of Databricks has all of them set'
    return Problem("error", what, "Spark has to know the servers' GPUs", f"{fix}; besides it needs {confs}")


def _whole_number(amount: str | None) -> int:
    """The number that a setting holds if it is a whole one, from 1; else 0."""
    try:
        number = float(amount or 0)
    except ValueError:
        return 0
    return int(number) if number >= 1 and number == int(number) else 0


def _wait_for_slots(session: _Session, gpus: _Gpus, num_tasks: int) -> int:
    """Count the slots; in an application that has just started, give its executors the time to register."""
    started = int(session.get("spark.app.startTime") or 0) / 1000
    deadline = time.monotonic() + _REGISTRATION_SECONDS - (time.time() - started)
    while (available := session.count_slots(gpus)) < num_tasks:
        if session.is_local or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return available
