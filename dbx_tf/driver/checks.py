"""Checks that need neither Spark nor a server: versions, hosts, spread, and what train_fn's code names.

Runs on: driver. Each yields the problems that it finds.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from dbx_tf.driver.reading import Used
from dbx_tf.errors import ArgumentProblem, Problem

_MIN_KERAS: Final = (3, 10)
_OF_ONE_SERVER: Final = ("/local_disk0/", "/databricks/driver/")
"""Folders of Databricks that every server has for itself."""


def is_legacy_keras(env: Mapping[str, str]) -> bool:
    """True if training processes with this environment use tf_keras as tf.keras."""
    return env.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def check_versions(versions: Mapping[str, str], num_workers: int, env: Mapping[str, str]) -> Iterator[Problem]:
    """What these package versions can't do with so many workers and this environment of the training processes."""
    if "tensorflow" not in versions and "tensorflow-cpu" not in versions:
        yield Problem(
            "error", "TensorFlow is not installed", "2.19 or newer", "%pip install tensorflow keras, or dbx-tf[tf]"
        )
    elif is_legacy_keras(env):
        if "tf-keras" not in versions:
            what = "TF_USE_LEGACY_KERAS is set, but tf_keras is not installed"
            tf_series = ".".join(versions.get("tensorflow", versions.get("tensorflow-cpu", "")).split(".")[:2])
            yield Problem(
                "error", what, "tf_keras of TensorFlow's own version", f"%pip install 'tf-keras=={tf_series}.*'"
            )
        return
    keras = versions.get("keras")
    if num_workers > 1 and keras and tuple(int(part) for part in keras.split(".")[:2]) < _MIN_KERAS:
        yield Problem(
            "error",
            f"Keras {keras} trains wrong on more than one worker (metrics before 3.10, gradients before 3.8)",
            "Keras 3.10 or newer, or tf_keras with TF_USE_LEGACY_KERAS=1",
            "%pip install 'keras>=3.10', then restart Python",
        )


def check_hosts(required: int | str | None, num_workers: int, num_hosts: int | None) -> Iterator[Problem]:
    """Whether so many workers can be on the required hosts, of which so many are there (None: not known)."""
    if required == "all" and num_hosts is None:
        what = 'require_hosts="all", but this Spark session does not tell how many hosts it has'
        yield ArgumentProblem("error", what, "a number", "give the number of servers")
        return
    needed = num_hosts if required == "all" else required
    if not isinstance(needed, int):
        return
    if num_hosts is not None and needed > num_hosts:
        what, possible = f"require_hosts={required}", f"the cluster has {num_hosts} host{'s' * (num_hosts > 1)}"
        yield Problem("error", what, possible, "wait until all servers have started, or lower require_hosts")
    elif needed > num_workers:
        what = f"require_hosts={required} needs workers on {needed} hosts, but there are {num_workers} workers"
        yield Problem("error", what, "each host needs a worker", "raise num_slots")


def check_spread(
    num_workers: int, executors: Sequence[str], available: int, task_cpus: int, gpus_per_task: int
) -> Iterator[Problem]:
    """Whether servers will stand idle, for want of workers or because workers share one.

    Args:
        num_workers: Workers, one task each (count).
        executors: The host of each executor.
        available: Tasks that the cluster runs at once (count).
        task_cpus: Cores of each task, `spark.task.cpus` (count).
        gpus_per_task: GPUs of each task (count).
    """
    num_hosts = len(set(executors))
    if num_workers < num_hosts:
        what = f"{_workers(num_workers)} on a cluster of {num_hosts} servers: {num_hosts - num_workers} will stand idle"
        fix = f"num_slots={num_hosts * max(gpus_per_task, 1)} trains on all servers"
        yield Problem("warning", what, "each worker trains on one server", fix)
    of_executor = max(available // len(executors), 1)
    of_host = of_executor * max(Counter(executors).values())
    fewest = math.ceil(num_workers / of_host)
    if fewest < min(num_workers, num_hosts):
        what = f"{num_workers} workers may share {fewest} of the {num_hosts} servers while others stand idle"
        possible = f"Spark may fill one server first, which has room for {of_host} tasks"
        fix = (
            f"set spark.task.cpus={of_executor * task_cpus} in the cluster's Spark config and restart it, so that one "
        )
        fix += "worker takes a whole server"
        if gpus_per_task:
            fix = f"use all GPUs with num_slots={available * gpus_per_task}, or give one worker all GPUs of a server: "
            fix += f"spark.task.resource.gpu.amount={of_executor * gpus_per_task} in the cluster's Spark config"
        spread = min(num_workers, num_hosts)
        yield Problem("warning", what, possible, f"{fix}; require_hosts={spread} refuses to train otherwise")


def check_use_of_cluster(settings_name: str, num_hosts: int) -> Iterator[Problem]:
    """Whether a run stays on the driver's machine though a Spark session has servers."""
    if num_hosts:
        what = (
            f"{settings_name} trains on the driver's machine alone, while {_servers(num_hosts)} of the Spark session "
        )
        possible = "without it, the workers are tasks on the cluster"
        yield Problem("warning", f"{what}stand idle", possible, f"leave {settings_name} out")


def check_code(used: Used, env: Mapping[str, str]) -> Iterator[Problem]:
    """What train_fn's code names that would not work together, or is not there."""
    names_keras = {module.partition(".")[0] for module in used.modules} & {"keras", "tf_keras"}
    if names_keras == {"keras", "tf_keras"} or (is_legacy_keras(env) and "keras" in names_keras):
        what = "train_fn uses keras (Keras 3) and tf_keras (Keras 2)"
        if is_legacy_keras(env):
            what = "train_fn imports keras (Keras 3), while TF_USE_LEGACY_KERAS makes tf.keras tf_keras (Keras 2)"
        possible = "layers, optimizers and callbacks of one do not work in models of the other"
        yield Problem("warning", what, possible, "use one of them for all")
    if "TensorBoard" in used.names and importlib.util.find_spec("tensorboard") is None:
        what = "train_fn names the TensorBoard callback, but tensorboard is not installed"
        yield Problem(
            "warning",
            what,
            "TensorFlow no longer brings it along",
            "%pip install tensorboard, on the workers too; MLflow has the same curves without it",
        )


def describe_strategy(used: Used, num_workers: int) -> str:
    """What train_fn trains with, in words: the strategy that it names, if that is another one, does not count."""
    if "MirroredStrategy" in used.names and num_workers > 1:
        return "MultiWorkerMirroredStrategy in place of train_fn's MirroredStrategy, which would use one server alone"
    return "MultiWorkerMirroredStrategy" if num_workers > 1 else "one worker"


def check_paths(used: Used, *, has_servers: bool) -> Iterator[Problem]:
    """Paths that mean something else on the workers than where they were written down."""
    for text, where in used.texts.items():
        if "\n" in text or " " in text:
            continue  # prose
        if text.startswith("dbfs:/"):
            what = f"the path {text} ({where})"
            possible = "Keras and TensorFlow take it for a folder named dbfs: where the process runs, without an error"
            yield Problem("warning", what, possible, f"use /dbfs/{text[6:].lstrip('/')}, or a volume: /Volumes/...")
        elif has_servers and text.startswith("/Workspace/"):
            possible = "workers can't write there, and may read files of up to 500 MB"
            yield Problem("warning", f"the path {text} ({where})", possible, "write to a volume: /Volumes/...")
        elif has_servers and where.startswith("argument ") and _is_of_one_server(text):
            what = f"the path {text} ({where}) is on the driver's own disk"
            possible = "every server has a folder of that name for itself"
            yield Problem(
                "warning",
                what,
                possible,
                "use a place that all servers see, such as /Volumes/...; plan(probe=True) asks",
            )


def _is_of_one_server(text: str) -> bool:
    roots = (*_OF_ONE_SERVER, tempfile.gettempdir() + "/")
    return text.startswith(roots) and Path(text).exists()


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def _servers(number: int) -> str:
    return f"{number} server{'s' * (number != 1)}"
