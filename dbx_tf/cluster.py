"""The arithmetic and the vocabulary of a cluster of workers: slots, TF_CONFIG, topology, batches.

Runs on: driver and workers. Pure: no Spark, no TensorFlow.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from dbx_tf.errors import ArgumentProblem, ConfigError, raise_problems


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where one worker ran and what it used."""

    worker_index: int
    """Position in TF_CONFIG, from 0; worker 0 is the chief."""
    host: str
    """Host name of the server."""
    address: str
    """`host:port` of its TensorFlow server."""
    executor: str
    """Spark's executor id, `driver` for a local master, `local` in local mode."""
    pid: int
    """Process id of the training process."""
    devices: tuple[str, ...]
    """TensorFlow's names of its devices, one replica each."""
    num_replicas: int
    """Model copies on this worker (count)."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Which host, process and device took part in a run."""

    workers: tuple[WorkerInfo, ...]
    num_replicas: int
    """Replicas in sync over all workers, as TensorFlow counts them (count)."""

    @property
    def num_workers(self) -> int:
        """Workers that trained (count)."""
        return len(self.workers)

    @property
    def num_hosts(self) -> int:
        """Different hosts among them (count)."""
        return len(Counter(_place(worker) for worker in self.workers))

    def __str__(self) -> str:
        parts = ((self.num_workers, "worker"), (self.num_hosts, "host"), (self.num_replicas, "replica"))
        workers, hosts, replicas = (f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in parts)
        return f"{workers} on {hosts}, {replicas} in sync"

    def advice(self) -> str | None:
        """Say why servers stand idle and how to use them, or None when every worker has a host of its own."""
        if self.num_hosts == self.num_workers:
            return None
        hosts = Counter(_place(worker)[0] for worker in self.workers)
        where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        shared = "on one host" if self.num_hosts == 1 else f"on {self.num_hosts} hosts"
        executors = len({worker.executor for worker in self.workers})
        because = (
            "because Spark fills the free slots of an executor before it goes on to the next"
            if executors < self.num_workers
            else "because their executors run on the same machine"
        )
        return (
            f"{self.num_workers} workers are {shared} ({where}), {because}; to spread them, give each task all cores "
            "of a server: set spark.task.cpus to the cores of one executor (or spark.task.resource.gpu.amount to its "
            "GPUs) in the cluster's Spark config, restart the cluster and use one slot per server (or per GPU)"
        )

    def to_json(self) -> str:
        """The topology as a JSON document (what the run's `topology.json` holds)."""
        summary = {"summary": str(self), "num_workers": self.num_workers, "num_hosts": self.num_hosts}
        document = {**summary, "num_replicas": self.num_replicas, "workers": [asdict(w) for w in self.workers]}
        return json.dumps(document, indent=2)


def _place(worker: WorkerInfo) -> tuple[str, str]:
    # Two machines of one host name (localhost.localdomain) differ by address, two of one address by name.
    return worker.host, split_address(worker.address)[0]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How `num_slots` map to Spark tasks; each task is one worker."""

    num_tasks: int
    gpus_per_task: int
    """GPUs each worker uses (count); 0 for CPU training."""


def layout_slots(num_slots: int, gpus_per_task: int = 0) -> SlotLayout:
    """Map slots to equal workers.

    Args:
        num_slots: GPUs, or CPU tasks when `gpus_per_task` is 0 (count, > 0).
        gpus_per_task: What Spark gives each task, `spark.task.resource.<name>.amount` (count).

    Returns:
        The number of tasks, and the GPUs each of them uses.

    Raises:
        ConfigError: If the slots can't be spread evenly; TensorFlow leaves unequal workers undefined.

    Source: MirroredStrategyRunner.get_num_tasks of spark-tensorflow-distributor 1.0.0, which splits unevenly.
    """
    if gpus_per_task == 0:
        return SlotLayout(num_tasks=num_slots, gpus_per_task=0)
    num_tasks = -(-num_slots // gpus_per_task)
    if num_slots % num_tasks:
        even = f"{num_slots // gpus_per_task * gpus_per_task} or {num_tasks * gpus_per_task}"
        what = f"num_slots={num_slots} can't be split evenly over {num_tasks} tasks of {gpus_per_task} GPUs each"
        possible = f"every worker needs the same number of GPUs, as with num_slots={even}"
        raise_problems((ArgumentProblem("error", what, possible, "change num_slots"),))
    return SlotLayout(num_tasks=num_tasks, gpus_per_task=num_slots // num_tasks)


def per_replica_batch_size(global_batch_size: int, num_replicas: int) -> int:
    """Split a global batch evenly over the replicas.

    Args:
        global_batch_size: Examples per optimizer step over all replicas (examples, > 0).
        num_replicas: Model copies over the whole cluster (count, > 0).

    Returns:
        Examples each replica sees per step (examples).

    Raises:
        ConfigError: If the batch does not divide evenly; the message names the nearest sizes that do.

    Source: tf.distribute.InputContext.get_per_replica_batch_size, TensorFlow 2.21.
    """
    if global_batch_size > 0 and global_batch_size % num_replicas == 0:
        return global_batch_size // num_replicas
    lower = global_batch_size // num_replicas * num_replicas
    nearest = [str(size) for size in (lower, lower + num_replicas) if size > 0]
    raise ConfigError(
        f"global_batch_size={global_batch_size} does not divide by {num_replicas} replicas; "
        f"the nearest that do are {' and '.join(nearest)}; change the batch size"
    )


def tf_config(addresses: tuple[str, ...], worker_index: int) -> str:
    """The TF_CONFIG of one worker: a cluster of equal workers of which the first is the chief.

    Args:
        addresses: `host:port` of every worker, in the order of their indices.
        worker_index: This worker's position in `addresses`.

    Source: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
    """
    task: dict[str, Any] = {"type": "worker", "index": worker_index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


def join_address(host: str, port: int) -> str:
    """`host:port`, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; brackets of an IPv6 address are taken off."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def without_password(text: str) -> str:
    """A text in which no address shows its user and password."""
    return re.sub(r"//[^/@\s]*@", "//***@", text)
