"""Starts one task per worker on the driver's machine, and says what any launcher has to do.

Runs on: driver.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Final, Protocol

from dbx_tf.driver.limits import Limits
from dbx_tf.driver.mlflow_calls import Snapshot
from dbx_tf.wire.events import Event, Hello
from dbx_tf.worker.probe import Finding, Probe
from dbx_tf.worker.task import Place, Program, run_here, run_worker

LOCAL_IP: Final = "127.0.0.1"
CANCEL_SECONDS: Final = 20.0
"""How long tasks that were told to end are waited for."""
_HERE: Final = Place(0, LOCAL_IP, "driver")
MakeDeputy = Callable[[], "Deputy"]
Take = Callable[[Hello, Event, IO[bytes]], None]
"""Takes an event, and its body, that did not come over the channel."""


@dataclass(frozen=True, slots=True)
class Deputy:
    """What worker 0 needs to lead a run in the driver's place, if the workers can't reach the driver."""

    payload: bytes = field(repr=False)
    """train_fn and its arguments, pickled."""
    versions: Mapping[str, str]
    """Versions on the driver."""
    snapshot: Snapshot | None
    """The MLflow run as it is at the start; None without tracking."""
    limits: Limits


class Launcher(Protocol):
    """Runs a Program once for each worker, in the background."""

    name: str
    host: str
    """The driver's address, as the tasks see it."""
    bind_host: str
    """The address for the driver to listen on."""
    has_servers: bool
    """True if tasks run on a cluster's servers: they can be spread, and have logs of their own."""
    is_live: bool
    """True if workers reach the driver while they train; otherwise their events come when they have ended."""

    def start(self, program: Program, make_deputy: MakeDeputy, take: Take) -> None:
        """Start all tasks; returns at once.

        Args:
            program: What each task runs.
            make_deputy: For a launcher whose workers can't reach the driver.
            take: Where it brings their events.
        """

    def is_running(self) -> bool:
        """True until all tasks have ended."""

    def error(self) -> BaseException | None:
        """What ended the launch, if it did not end well."""

    def finish(self) -> None:
        """Wait for the tasks to end after they were told to; end them by force if they don't."""

    def collect(self, probe: Probe, seconds: float) -> list[Finding]:
        """Look around on all workers (on one, where all are on this machine); takes at most so long.

        Raises:
            ClusterError: If it does not end in time, or fails.
        """


def local_places(num_workers: int, gpus: tuple[str, ...] = ()) -> list[Place]:
    """The workers of a run on this machine; the GPUs are split evenly."""
    each = len(gpus) // num_workers
    return [Place(index, LOCAL_IP, "local", gpus[index * each : (index + 1) * each]) for index in range(num_workers)]


class LocalLauncher:
    """One thread per worker in the driver's process, each with its own training process."""

    name = "local"
    has_servers = False
    is_live = True

    def __init__(self, places: Sequence[Place]) -> None:
        self.host = self.bind_host = places[0].ip
        self._places = places
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, program: Program, make_deputy: MakeDeputy, take: Take) -> None:
        """Start the workers' threads; a training process dies with the thread that started it."""
        for place in self._places:
            name = f"dbx_tf-worker-{place.worker_index}"
            self._threads.append(threading.Thread(target=self._run, args=(program, place), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _run(self, program: Program, place: Place) -> None:
        try:
            run_worker(program, place)
        except BaseException as error:  # noqa: BLE001  # it is told by the thread that waits
            self._errors.append(error)

    def is_running(self) -> bool:
        """True until all workers have ended."""
        return any(thread.is_alive() for thread in self._threads)

    def error(self) -> BaseException | None:
        """What ended the first worker that did not end well."""
        return self._errors[0] if self._errors else None

    def finish(self) -> None:
        """Wait for the workers to end; they end their processes by force as soon as they are told to stop."""
        for thread in self._threads:
            thread.join(CANCEL_SECONDS)

    def collect(self, probe: Probe, seconds: float) -> list[Finding]:
        """All workers find the same here."""
        return [probe.look(self._places[0])]


class InProcessLauncher:
    """The only worker of a run in the calling process, in the calling thread: for a debugger."""

    name = "in process"
    host = bind_host = LOCAL_IP
    has_servers = False
    is_live = True

    def start(self, program: Program, make_deputy: MakeDeputy, take: Take) -> None:
        """Train; returns when training has ended."""
        before = dict(os.environ)
        os.environ.update(program.env)
        try:
            run_here(program, _HERE)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def is_running(self) -> bool:
        """False: start has waited for the end."""
        return False

    def error(self) -> BaseException | None:
        """None: what fails is reported as an event."""
        return None

    def finish(self) -> None:
        """Nothing is left to wait for."""

    def collect(self, probe: Probe, seconds: float) -> list[Finding]:
        """Look around here."""
        return [probe.look(_HERE)]
