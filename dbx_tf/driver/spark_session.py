"""What is asked of a Spark session, classic or Spark Connect: settings, slots, executors, and a launcher for it.

Runs on: driver.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from dbx_tf.driver.launch import Launcher
from dbx_tf.driver.spark_launch import ConnectLauncher, SparkLauncher


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a task."""

    per_task: int
    """Count; 0 to train on CPUs."""
    resource_name: str
    needs_profile: bool = False
    """True if the session's own settings don't give a task so many."""


class Session(ABC):
    """What is asked of a Spark session."""

    def __init__(self, spark: Any) -> None:
        self.spark = spark

    @abstractmethod
    def get(self, key: str) -> str | None:
        """A setting of the Spark application."""

    @abstractmethod
    def count_slots(self, gpus: Gpus) -> int:
        """Tasks that can run at once."""

    @abstractmethod
    def executors(self) -> tuple[str, ...] | None:
        """The host of each executor; None if that is not to be seen."""

    @abstractmethod
    def count_cores(self) -> int | None:
        """Cores of all executors; None if that is not to be seen."""

    @abstractmethod
    def make_launcher(self, num_tasks: int, gpus: Gpus) -> Launcher:
        """What starts so many tasks."""

    @property
    def task_cpus(self) -> int:
        """Cores of each task (count)."""
        return int(self.get("spark.task.cpus") or 1)

    @property
    def is_local(self) -> bool:
        """True if all tasks run in the driver's JVM."""
        return (self.get("spark.master") or "").startswith("local[")


class ClassicSession(Session):
    """A session with a SparkContext; what is not public is asked of the JVM."""

    def __init__(self, spark: Any) -> None:
        super().__init__(spark)
        self._context = spark.sparkContext
        self._conf = self._context.getConf()

    def get(self, key: str) -> str | None:
        """From the SparkContext's configuration."""
        value: str | None = self._conf.get(key, None)
        return value

    def count_slots(self, gpus: Gpus) -> int:
        """As Spark's own barrier check counts them (private, Spark 4.3; 5 ms)."""
        try:
            jvm = self._context._jsc.sc()
            return int(jvm.maxNumConcurrentTasks(jvm.resourceProfileManager().defaultResourceProfile()))
        except Exception:  # noqa: BLE001  # py4j raises its own errors where a cluster hides these methods
            return int(self._context.defaultParallelism) // self.task_cpus

    def executors(self) -> tuple[str, ...] | None:
        """From Spark's status tracker, in which the driver counts as an executor."""
        try:
            hosts = [info.host() for info in self._context._jsc.sc().statusTracker().getExecutorInfos()]
        except Exception:  # noqa: BLE001  # as in count_slots
            return None
        with contextlib.suppress(ValueError):
            hosts.remove(self.get("spark.driver.host"))
        return tuple(hosts) or None

    def count_cores(self) -> int | None:
        """Spark's default parallelism, unless that was set to something else."""
        return None if self.get("spark.default.parallelism") else int(self._context.defaultParallelism)

    def make_launcher(self, num_tasks: int, gpus: Gpus) -> Launcher:
        """MirroredStrategyRunner."""
        return SparkLauncher(self.spark, num_tasks)


class ConnectSession(Session):
    """A session of Spark Connect, which tells less."""

    def get(self, key: str) -> str | None:
        """As the server tells it."""
        value: str | None = self.spark.conf.get(key, None)
        return value

    def count_slots(self, gpus: Gpus) -> int:
        """From the partitions that Spark would give a range: one for each core of the executors (no job is run).

        How many executors they belong to is not to be seen here, unless their size is set: then GPUs count too.
        """
        cores, of_task = self.count_cores() or sys.maxsize, self.task_cpus  # Spark itself checks when the job starts
        of_executor = int(self.get("spark.executor.cores") or 0)
        if not of_executor:
            return cores // of_task
        slots = of_executor // of_task
        if gpus.per_task:
            has = int(self.get(f"spark.executor.resource.{gpus.resource_name}.amount") or 0)
            slots = min(slots, has // gpus.per_task)
        return slots * (cores // of_executor)

    def count_cores(self) -> int | None:
        """As in count_slots."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.spark.range(1).explain(extended=True)
        found = re.search(r"splits=Some\((\d+)\)", out.getvalue())
        return int(found.group(1)) if found else None

    def executors(self) -> tuple[str, ...] | None:
        """Not to be seen."""
        return None

    def make_launcher(self, num_tasks: int, gpus: Gpus) -> Launcher:
        """A barrier job, with a resource profile for GPUs that tasks do not get by themselves."""
        if not gpus.needs_profile:
            return ConnectLauncher(self.spark, num_tasks)
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        task = TaskResourceRequests().cpus(self.task_cpus)
        task = task.resource(gpus.resource_name, gpus.per_task)
        profile = ResourceProfileBuilder().require(task).build
        _ = profile.id  # Spark registers it now: in the launcher's thread, no session is active
        return ConnectLauncher(self.spark, num_tasks, profile)


def open_session() -> Session:
    """The active session, or a new one."""
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    return ConnectSession(session) if is_remote() else ClassicSession(session)


def count_idle_hosts() -> int:
    """Servers of the active Spark session that a run on the driver's machine would not use (count)."""
    spark = sys.modules.get("pyspark.sql")
    session = spark.SparkSession.getActiveSession() if spark else None
    if session is None or not hasattr(session, "_jsc"):
        return 0  # no session, or Spark Connect, which does not tell
    classic = ClassicSession(session)
    return 0 if classic.is_local else len(set(classic.executors() or ()))
