"""What is known of the workers of one run, and what follows when it is compared.

Runs on: driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dbx_tf.cluster import Topology, WorkerInfo
from dbx_tf.wire import events
from dbx_tf.wire.channel import Connection
from dbx_tf.worker.environment import version_differences


@dataclass(slots=True)
class Worker:
    """One worker, as far as it has told."""

    index: int
    task: Connection | None = None
    training: Connection | None = None
    joined: events.Joined | None = None
    ready: events.Ready | None = None
    finished: events.Finished | None = None
    exited: events.Exited | None = None
    inspected: events.Inspected | None = None
    """What it was found doing, since it was asked last."""

    @property
    def host(self) -> str:
        """Where its task runs; empty before it has joined."""
        return self.joined.host if self.joined else ""

    @property
    def address(self) -> str:
        """Where TensorFlow listens on it; a question mark before it has joined."""
        return self.joined.address if self.joined else "?"

    @property
    def info(self) -> WorkerInfo | None:
        """Where it trains; None before it has joined, and without process and devices before it is ready."""
        if self.joined is None:
            return None
        devices = tuple(self.ready.devices) if self.ready else ()
        return WorkerInfo(
            worker_index=self.index,
            host=self.joined.host,
            address=self.joined.address,
            executor=self.joined.executor,
            pid=self.ready.pid if self.ready else 0,
            devices=devices,
            num_replicas=len(devices),
        )


class Workers:
    """All workers of one run, in order."""

    def __init__(self, num_workers: int) -> None:
        self._workers = [Worker(index) for index in range(num_workers)]

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, worker_index: int) -> Worker:
        return self._workers[worker_index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    @property
    def topology(self) -> Topology | None:
        """Where the workers sit; None before all of them are ready."""
        return self.placement if all(worker.ready is not None for worker in self._workers) else None

    @property
    def placement(self) -> Topology:
        """Where those sit that have joined, ready or not."""
        infos = [info for worker in self._workers if (info := worker.info) is not None]
        ready = self._workers[0].ready
        return Topology(workers=tuple(infos), num_replicas=ready.num_replicas if ready else 0)

    def joined(self, attempt: int) -> list[events.Joined]:
        """What those said that have joined this attempt."""
        return [w.joined for w in self._workers if w.joined is not None and w.joined.attempt == attempt]

    def differing(
        self, joined: Sequence[events.Joined], driver_versions: Mapping[str, str]
    ) -> tuple[Worker, str] | None:
        """The first worker whose versions are not those of worker 0, or of the driver, and what to do about it."""
        for worker, each in zip(self._workers, joined, strict=True):
            where, expected = "the driver", driver_versions
            if version_differences(each.versions, joined[0].versions):
                where, expected = f"worker 0 on host {joined[0].host}", joined[0].versions
            if found := version_differences(each.versions, expected):
                text = f"versions differ from those of {where}: {found}; driver and workers need the same; "
                return worker, text + "install the packages as libraries of the cluster"
        return None
