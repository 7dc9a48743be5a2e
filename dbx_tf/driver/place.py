"""Where a run would be: in this process, on this machine, or on the executors of a Spark session.

Runs on: driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dbx_tf.cluster import SlotLayout
from dbx_tf.driver import spark_layout, spark_session
from dbx_tf.driver.checks import check_spread, check_use_of_cluster
from dbx_tf.driver.launch import InProcessLauncher, Launcher, LocalLauncher, local_places
from dbx_tf.driver.settings import Settings
from dbx_tf.errors import Problem

_HERE: Final = ("localhost",)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run would be."""

    slots: SlotLayout
    start: Callable[[], Launcher] | None = None
    """Makes the launcher; None if the run can't be there."""
    available: int | None = None
    """Tasks that can run at once (count); None where nothing limits them."""
    executors: tuple[str, ...] | None = None
    """The host of each of Spark's executors; None where the session does not tell."""
    cores: int | None = None
    """Cores of all of them (count); None where the session does not tell."""
    task_cpus: int = 1
    """Cores that Spark reserves for each worker (count)."""

    @property
    def num_hosts(self) -> int | None:
        """Hosts that could take part (count); None where the session does not tell."""
        return None if self.executors is None else len(set(self.executors))


def find_place(settings: Settings, problems: list[Problem]) -> RunPlace:
    """Where a run with these settings would be; what stands in the way is added to `problems`.

    Raises:
        ConfigError: If the slots can't be spread evenly over tasks.
    """
    if settings.in_process:
        problems += check_use_of_cluster("in_process=True", spark_session.count_idle_hosts())
        return RunPlace(SlotLayout(1, 0), InProcessLauncher, executors=_HERE, cores=os.cpu_count())
    if settings.local_mode:
        problems += check_use_of_cluster("local_mode=True", spark_session.count_idle_hosts())
        gpus = local_gpus() if settings.use_gpu is not False else ()
        if settings.use_gpu and len(gpus) < settings.num_slots:
            what = f"num_slots={settings.num_slots} with use_gpu=True, but the driver's machine has {len(gpus)} GPUs"
            fix = "lower num_slots, or train on the cluster with local_mode=False, or on CPUs with use_gpu=False"
            problems.append(Problem("error", what, "local mode uses one GPU for each slot", fix))
        use_gpu = len(gpus) >= settings.num_slots
        mine = gpus[: settings.num_slots] if use_gpu else ()
        layout = SlotLayout(settings.num_slots, 1 if use_gpu else 0)
        places = local_places(settings.num_slots, mine)
        return RunPlace(layout, lambda: LocalLauncher(places), executors=_HERE, cores=os.cpu_count())
    spark = spark_layout.lay_out(settings.num_slots, settings.use_gpu, settings.gpu_resource_name, problems)
    launcher = spark.launcher
    start = (lambda: launcher) if launcher else None
    if spark.executors and spark.available:
        layout = spark.slots
        problems += check_spread(
            layout.num_tasks, spark.executors, spark.available, spark.task_cpus, layout.gpus_per_task
        )
    return RunPlace(spark.slots, start, spark.available, spark.executors, spark.cores, spark.task_cpus)


def local_gpus() -> tuple[str, ...]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(gpu for gpu in visible.split(",") if gpu and gpu != "-1")
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()
