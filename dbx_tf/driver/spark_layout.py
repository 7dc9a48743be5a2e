"""How a run would fit on the Spark session: tasks, GPUs, and what its settings forbid.

Runs on: driver.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dbx_tf.cluster import SlotLayout, layout_slots
from dbx_tf.driver.launch import SparkLauncher
from dbx_tf.errors import Problem

_REGISTRATION_SECONDS: Final = 30.0
"""So long after an application's start executors may still come (spark.scheduler.maxRegisteredResourcesWaitingTime)."""


@dataclass(frozen=True, slots=True)
class SparkLayout:
    """How a run would fit on a Spark session."""

    slots: SlotLayout
    available: int | None = None
    """Tasks the cluster can run at once (count); None if it was not asked."""
    launcher: SparkLauncher | None = None


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
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    if is_remote() or "SPARK_REMOTE" in os.environ:
        problems.append(
            Problem(
                "error",
                "this Spark session is Spark Connect (standard access mode, serverless compute or databricks-connect)",
                "workers are started through a SparkContext, which only a classic session has",
                "use a cluster with dedicated access mode, or local_mode=True to train on this machine",
            )
        )
        return nothing
    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    context = session.sparkContext
    conf = context.getConf()
    problems += _check_spark(conf, context.master)
    amount_key = f"spark.task.resource.{gpu_resource_name}.amount"
    gpus_per_task, problem = _gpus_per_task(conf.get(amount_key), amount_key, use_gpu)
    if problem is not None:
        problems.append(problem)
        return nothing
    layout = layout_slots(num_slots, gpus_per_task)
    available = _wait_for_slots(context, conf, layout.num_tasks)
    if layout.num_tasks > available:
        cpus = conf.get("spark.task.cpus", "1")
        problems.append(
            Problem(
                "error",
                f"num_slots={num_slots} needs {layout.num_tasks} tasks at once, but this cluster runs at most "
                f"{available} (spark.task.cpus={cpus})",
                "Spark would wait ten minutes for more; possible is num_slots up to "
                f"{available * max(gpus_per_task, 1)}",
                "lower num_slots, add servers, or wait until all servers have started",
            )
        )
    return SparkLayout(layout, available, SparkLauncher(session, layout.num_tasks))


def _check_spark(conf: Any, master: str) -> Iterator[Problem]:
    if conf.get("spark.dynamicAllocation.enabled", "false").strip().lower() == "true" and not master.startswith(
        "local["
    ):
        yield Problem(
            "error",
            "spark.dynamicAllocation.enabled=true",
            "workers that train together need a cluster of fixed size (Spark's barrier mode, SPARK-24942)",
            "set it to false in the cluster's Spark config",
        )
    ssl = conf.get("spark.ssl.enabled", "false").strip().lower() == "true"
    if ssl and conf.get("tensorflow.spark.distributor.ignoreSsl", "false").strip().lower() != "true":
        yield Problem(
            "error",
            "spark.ssl.enabled=true",
            "TensorFlow sends gradients between the workers without encryption",
            "if your network allows that, set tensorflow.spark.distributor.ignoreSsl=true in the Spark config",
        )


def _gpus_per_task(amount: str | None, key: str, use_gpu: bool | None) -> tuple[int, Problem | None]:
    """GPUs Spark gives each task (0 to train on CPUs), or why they can't be used."""
    if use_gpu is False or (use_gpu is None and amount is None):
        return 0, None
    whole = "it has to be a whole number from 1: a worker has its GPUs to itself"
    fix = f"set {key} to 1, or to the GPUs of one server for one worker each, in the cluster's Spark config; "
    fix += "or train on CPUs with use_gpu=False"
    if amount is None:
        what = f"use_gpu=True, but {key} is not set: this cluster does not schedule GPUs"
        confs = "spark.executor.resource.gpu.amount=1, spark.executor.resource.gpu.discoveryScript=/path/to/script "
        confs += '(it prints {"name": "gpu", "addresses": ["0"]}); a GPU cluster of Databricks has all of them set'
        return 0, Problem("error", what, "Spark has to know the servers' GPUs", f"{fix}; besides it needs {confs}")
    try:
        number = float(amount)
    except ValueError:
        number = 0.0
    if number < 1 or number != int(number):
        if use_gpu is None and number == 0:
            return 0, None
        return 0, Problem("error", f"{key}={amount}", whole, fix)
    return int(number), None


def _wait_for_slots(context: Any, conf: Any, num_tasks: int) -> int:
    """Count the slots; in an application that has just started, give its executors the time to register."""
    deadline = time.monotonic() + _REGISTRATION_SECONDS - (time.time() - context.startTime / 1000)
    while (available := _slots_available(context, conf)) < num_tasks:
        if context.master.startswith("local[") or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return available


def _slots_available(context: Any, conf: Any) -> int:
    """Tasks that can run at once, as Spark's own barrier check counts them (private, Spark 4.3; 5 ms)."""
    try:
        jvm = context._jsc.sc()
        return int(jvm.maxNumConcurrentTasks(jvm.resourceProfileManager().defaultResourceProfile()))
    except Exception:  # noqa: BLE001  # py4j raises its own errors where a cluster hides these methods
        return int(context.defaultParallelism) // int(conf.get("spark.task.cpus", "1"))
