"""What is known of the workers of one run, and what follows when it is compared.

Runs on: driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dbx_tf.cluster import Topology, WorkerInfo
from dbx_tf.errors import Failure
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
    heard: float = 0.0
    """When it last said anything."""

    @property
    def host(self) -> str:
        """Where its task runs; empty before it has joined."""
        return self.joined.host if self.joined else ""

    @property
    def info(self) -> WorkerInfo | None:
        """Where it trains; None before it is ready."""
        if self.joined is None or self.ready is None:
            return None
        return WorkerInfo(
            worker_index=self.index,
            host=self.joined.host,
            address=self.joined.address,
            executor=self.joined.executor,
            pid=self.ready.pid,
            devices=tuple(self.ready.devices),
            num_replicas=len(self.ready.devices),
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
        infos = [info for worker in self._workers if (info := worker.info) is not None]
        if len(infos) < len(self._workers):
            return None
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

    def not_started(self, seconds: float) -> Failure:
        """What to say when not all are ready in time: who was never started, or has no strategy."""
        absent = [str(worker.index) for worker in self._workers if worker.joined is None]
        waiting = [f"{w.index} on host {w.host}" for w in self._workers if w.joined is not None and w.ready is None]
        text = f"not all workers were ready after {seconds:.0f} s"
        if absent:
            text += f"; Spark never started the task of worker {', '.join(absent)}"
        elif waiting:
            text += f"; no strategy on worker {', '.join(waiting)}: can the workers reach each other's ports?"
        return Failure(cause_type="StartTimeout", cause_message=text)

    def left_behind(self, seconds: float) -> Failure | None:
        """The failure of a worker that has been silent so long though another has finished; None if there is none."""
        done = next((worker for worker in self._workers if worker.finished is not None), None)
        for worker in self._workers:
            if done and worker.finished is None and time.monotonic() > worker.heard + seconds:
                text = f"worker {done.index} has finished, but this one has said nothing for {seconds:.0f} s: it "
                text += "probably waits for the other in a collective; every worker has to make the same steps, and "
                return Failure(worker.index, worker.host, "Stalled", text + "to stop in the same epoch")
        return None
