"""Leads the workers of one run: brings them together, follows them, lets them go, or says why they failed.

Runs on: driver. Events come in on the channel's threads; `wait` is for the thread that called run().
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, Final

from dbx_tf.cluster import Topology
from dbx_tf.driver import diagnosis
from dbx_tf.driver.failures import FailureLog
from dbx_tf.driver.journal import NullJournal
from dbx_tf.driver.launch import CANCEL_SECONDS, Launcher
from dbx_tf.driver.limits import Limits
from dbx_tf.driver.tracker import NullTracker
from dbx_tf.driver.workers import Worker, Workers
from dbx_tf.errors import Failure
from dbx_tf.wire import events
from dbx_tf.wire.channel import Connection, Listener

_MAX_ATTEMPTS: Final = 4
_INSPECT_SECONDS: Final = 5.0
"""How long workers have to tell what they are doing."""
_SETTLE_SECONDS: Final = 1.0
"""How long a launch that ended waits for what its workers have sent."""

_NO_PROGRESS: Final = (events.LogLines, events.Notice, events.Inspected)
"""What a worker that makes no step may say."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    failure: Failure | None
    value: Any = None
    value_error: str = ""
    model_summary: str = ""


class Supervisor:
    """State of the workers of one run."""

    def __init__(
        self,
        launcher: Launcher,
        num_workers: int,
        driver_versions: Mapping[str, str],
        journal: NullJournal,
        tracker: NullTracker,
        payload: bytes,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._started = self._progressed = time.monotonic()
        self._launcher, self._journal, self._tracker, self._payload = launcher, journal, tracker, payload
        self._driver_versions = driver_versions
        self._workers = Workers(num_workers)
        self._failures = FailureLog()
        self._attempt = 1
        self._value = b""
        self._is_stopped = False
        self._changed = threading.Condition(threading.RLock())
        self._listener = Listener(launcher.bind_host, num_workers, self._on_event, self._on_close)
        self.address = replace(self._listener.address, host=launcher.host)
        """Where the workers have to connect to."""

    @property
    def topology(self) -> Topology | None:
        """Where the workers sit; None before all of them are ready."""
        return self._workers.topology

    @property
    def num_restarts(self) -> int:
        """How often the workers were started again (count)."""
        return self._attempt - 1

    def wait(self, on_ready: Callable[[Topology], None]) -> Outcome:
        """Wait for the run to end; `on_ready` is called once, when all workers are ready."""
        is_told = False
        ended: float | None = None
        while True:
            with self._changed:
                self._changed.wait(0.2)
                topology = self.topology
                is_over = ended is not None and time.monotonic() > ended + _SETTLE_SECONDS
                failure = self._failures.first_cause(final=is_over)
                is_done = self._failures.is_empty and all(worker.exited is not None for worker in self._workers)
            if topology is not None and not is_told:
                is_told = True
                on_ready(topology)
            if failure is not None:
                return Outcome(self._look_behind(failure))
            if is_done:
                return self._success()
            if is_over:
                return Outcome(diagnosis.launch_ended(self._launcher.error()))
            if self._failures.is_empty and (failure := self._overdue()) is not None:
                return Outcome(failure)
            if ended is None and not self._launcher.is_running():
                ended = time.monotonic()

    def _overdue(self) -> Failure | None:
        """What has taken too long."""
        limits, now = self._limits, time.monotonic()
        is_ready, is_live = self.topology is not None, self._launcher.is_live
        # Where the workers can't be reached, worker 0 watches over the limits, and has a word to say about it.
        patience = 0.0 if is_live else CANCEL_SECONDS
        if limits.timeout_seconds is not None and now > self._started + limits.timeout_seconds + patience:
            describe, seconds = diagnosis.out_of_time, limits.timeout_seconds
        elif is_live and not is_ready and now > self._started + limits.start_timeout_seconds:
            describe, seconds = diagnosis.not_started, limits.start_timeout_seconds
        elif is_live and is_ready and now > self._progressed + limits.stall_timeout_seconds:
            describe, seconds = diagnosis.stalled, limits.stall_timeout_seconds
        else:
            return None
        self._inspect()
        return describe(self._workers, seconds)

    def _look_behind(self, failure: Failure) -> Failure:
        """The failure, or if it is an echo and nothing else is known, the worker that it comes from."""
        if not self._failures.is_echo:
            return failure
        self._inspect()
        first = self._failures.first_cause(final=True) or failure
        silent = diagnosis.unresponsive(self._workers) if self._failures.is_echo else None
        return silent or first

    def _inspect(self) -> None:
        """Ask all workers what they are doing, and give them a moment to answer."""
        with self._changed:
            for worker in self._workers:
                worker.inspected = None
                _command(worker.task, events.Inspect())
            asked = [worker for worker in self._workers if worker.task is not None]
            self._changed.wait_for(lambda: all(w.inspected or w.exited for w in asked), _INSPECT_SECONDS)

    def stop(self, reason: str) -> None:
        """Have every task end its training process and fail."""
        with self._changed:
            self._is_stopped = True
            for worker in self._workers:
                _command(worker.task, events.Stop(reason=reason))

    @property
    def has_connections(self) -> bool:
        """True while a worker is connected."""
        return self._listener.has_connections

    def close(self) -> None:
        """Close all connections; a task that still runs takes it as an order to stop."""
        self._listener.close()

    # What the workers say.

    def _on_event(self, connection: Connection, hello: events.Hello, event: events.Event, body: IO[bytes]) -> None:
        self.take(hello, event, body, connection)

    def take(
        self, hello: events.Hello, event: events.Event, body: IO[bytes], connection: Connection | None = None
    ) -> None:
        """Act on what a worker says; without a connection it is told what has been, and can't be answered."""
        worker = self._workers[hello.worker_index]
        if not isinstance(event, _NO_PROGRESS):
            self._progressed = time.monotonic()
        event = self._journal.masked(event)
        with body:
            match event:
                case events.LogLines():
                    self._journal.add_output(worker.index, event.lines)
                case events.Metrics():
                    self._journal.add_metrics(worker.index, event)
                case events.Notice():
                    self._journal.add_notice(event.text)
                case events.ModelFile():
                    self._journal.add_model_file(event.path, body)
                case events.Call() | events.Upload():
                    self._serve(connection, worker, event, body)
                case _:
                    with self._changed:
                        if hello.role == events.Role.TASK or hello.attempt == self._attempt:
                            self._follow(connection, worker, event, body)  # else: from a process that was given up
                        self._changed.notify_all()

    def _follow(self, connection: Connection | None, worker: Worker, event: events.Event, body: IO[bytes]) -> None:
        match event:
            case events.Joined():
                worker.task, worker.joined = connection, event
                self._start_if_complete(worker)
            case events.Ready():
                worker.training, worker.ready = connection, event
            case events.PortTaken():
                self._start_again(worker)
            case events.Failed():
                failure = Failure(worker.index, worker.host, event.cause_type, event.cause_message, event.traceback)
                self._failures.add(failure, is_echo=event.is_echo)
            case events.Finished():
                worker.finished = event
                self._value = body.read() if worker.index == 0 else self._value
                self._release_if_complete()
            case events.Exited():
                worker.exited = event
                if worker.finished is None or event.exit_code != 0:
                    self._failures.add_exit(worker.index, worker.host, event)
            case events.Inspected():
                worker.inspected = event

    def _on_close(self, connection: Connection, hello: events.Hello) -> None:
        with self._changed:
            worker = self._workers[hello.worker_index]
            if connection is worker.task and worker.exited is None and not self._is_stopped:
                self._fail(worker, "TaskLost", diagnosis.TASK_LOST)
                worker.task = None
            self._changed.notify_all()

    def _serve(
        self, connection: Connection | None, worker: Worker, event: events.Call | events.Upload, body: IO[bytes]
    ) -> None:
        try:
            answer = None
            if isinstance(event, events.Call):
                # Only our own workers get here, with the run's token; they could run any code in the cluster anyway.
                answer = self._tracker.answer(worker.index, event, pickle.load(body))  # noqa: S301
            else:
                self._tracker.upload(worker.index, event, body)
            reply, answer_body = events.Reply(), pickle.dumps(answer)
        except Exception as error:  # noqa: BLE001  # it is raised where user code called MLflow
            reply, answer_body = events.Reply(error=f"{type(error).__name__}: {error}"), b""
        if connection is not None:
            connection.send(reply, answer_body)

    # What follows from it.

    def _start_if_complete(self, joining: Worker) -> None:
        assert joining.joined is not None
        if joining.joined.error:
            self._fail(joining, "ClusterError", joining.joined.error)
        joined = self._workers.joined(self._attempt)
        if len(joined) < len(self._workers) or any(each.error for each in joined):
            return
        if differing := self._workers.differing(joined, self._driver_versions):
            worker, text = differing
            self._fail(worker, "ClusterError", text)
            return
        placement = self._workers.placement
        if placement.num_hosts < self._limits.num_hosts:
            self._failures.add(diagnosis.too_few_hosts(placement, self._limits.num_hosts), has_exited=True)
            return
        addresses = tuple(each.address for each in joined)
        for each in self._workers:
            _command(each.task, events.Start(addresses=addresses), self._payload)

    def _start_again(self, worker: Worker) -> None:
        if self._attempt == _MAX_ATTEMPTS:
            self._fail(worker, "ClusterError", diagnosis.NO_PORT.format(worker.address, _MAX_ATTEMPTS - 1))
            return
        self._attempt += 1
        text = f"worker {worker.index} lost its port to another program; all workers start again with new ports"
        self._journal.add_notice(text)
        for each in self._workers:
            each.ready = each.training = None
            _command(each.task, events.Rejoin(attempt=self._attempt))

    def _release_if_complete(self) -> None:
        if all(worker.finished is not None for worker in self._workers):
            for worker in self._workers:
                _command(worker.training, events.Release())

    def _fail(self, worker: Worker, cause: str, text: str) -> None:
        self._failures.add(Failure(worker.index, worker.host, cause, text), has_exited=True)

    def _success(self) -> Outcome:
        finished = self._workers[0].finished
        assert finished is not None
        value, value_error = None, finished.value_error
        if not value_error:
            try:
                value = pickle.loads(self._value)  # noqa: S301  # as in _serve: from the chief of our own run
            except Exception as error:  # noqa: BLE001  # unpickling imports and runs what the value needs
                value_error = f"a value that can't be loaded on the driver ({type(error).__name__}: {error})"
        return Outcome(None, value, value_error, finished.model_summary)


def _command(connection: Connection | None, event: events.Event, body: bytes = b"") -> None:
    if connection is not None:
        with contextlib.suppress(OSError):  # a lost worker is noticed by its closed connection
            connection.send(event, body)
