"""How a run would fit on the Spark session: tasks, GPUs, and what its settings forbid.

Runs on: driver.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dbx_tf.cluster import SlotLayout, layout_slots
from dbx_tf.driver.launch import Launcher
from dbx_tf.driver.spark_session import ConnectSession, Gpus, Session, open_session
from dbx_tf.errors import Problem

_REGISTRATION_SECONDS: Final = 30.0
"""So long after an application's start executors may still come (spark.scheduler.maxRegisteredResourcesWaitingTime)."""

_most_slots: dict[str, int] = {}
"""Tasks that each Spark application has been seen to run at once (count), by application id."""
_SCALING: Final = "spark.databricks.clusterUsageTags.clusterScalingType"
"""Set by Databricks: autoscaling or fixed_size."""


@dataclass(frozen=True, slots=True)
class SparkLayout:
    """How a run would fit on a Spark session."""

    slots: SlotLayout
    available: int | None = None
    """Tasks the cluster can run at once (count); None if it was not asked."""
    launcher: Launcher | None = None
    executors: tuple[str, ...] | None = None
    """The host of each executor; None if the session does not tell."""
    task_cpus: int = 1
    """Cores of each task, `spark.task.cpus` (count)."""
    cores: int | None = None
    """Cores of all executors (count); None if the session does not tell."""


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
    session = open_session()
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
                f"{available} (spark.task.cpus={session.task_cpus})",
                "Spark would wait ten minutes for more; possible is num_slots up to "
                f"{available * max(gpus.per_task, 1)}",
                "lower num_slots, add servers, or wait until all servers have started",
            )
        )
    return SparkLayout(
        layout,
        available,
        session.make_launcher(layout.num_tasks, gpus),
        ("localhost",) if session.is_local else session.executors(),
        session.task_cpus,
        session.count_cores(),
    )


def _check_spark(session: Session) -> Iterator[Problem]:
    if _is_true(session.get("spark.dynamicAllocation.enabled")) and not session.is_local:
        yield Problem(
            "error",
            "spark.dynamicAllocation.enabled=true",
            "workers that train together need a cluster of fixed size (Spark's barrier mode, SPARK-24942)",
            "set it to false in the cluster's Spark config",
        )
    if (session.get(_SCALING) or "").lower() == "autoscaling":
        yield Problem(
            "warning",
            "this cluster autoscales",
            "servers that join while training runs stay idle, and the plan sees only those that are up now",
            "give it a fixed number of servers",
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


def _find_gpus(session: Session, num_slots: int, use_gpu: bool | None, name: str) -> Gpus | Problem:
    """The GPUs of each task, or why they can't be used."""
    key = f"spark.task.resource.{name}.amount"
    amount, of_executor = session.get(key), session.get(f"spark.executor.resource.{name}.amount")
    if use_gpu is False or (use_gpu is None and amount is None):
        return Gpus(0, name)
    number = _whole_number(amount)
    if number:
        return Gpus(number, name)
    if isinstance(session, ConnectSession) and (number := _whole_number(of_executor)):
        return Gpus(math.gcd(num_slots, number), name, needs_profile=True)
    if amount == "0" and use_gpu is None:
        return Gpus(0, name)
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


def _wait_for_slots(session: Session, gpus: Gpus, num_tasks: int) -> int:
    """Count the slots; executors of an application that has just started, or has lost some, get time to register."""
    application = session.get("spark.app.id") or ""
    started = int(session.get("spark.app.startTime") or 0) / 1000
    age = 0.0 if _most_slots.get(application, 0) >= num_tasks else time.time() - started
    deadline = time.monotonic() + _REGISTRATION_SECONDS - age
    while (available := session.count_slots(gpus)) < num_tasks:
        if session.is_local or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    _most_slots[application] = max(available, _most_slots.get(application, 0))
    return available
