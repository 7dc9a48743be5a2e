"""Leads a run from inside Spark where the workers can't reach the driver, and tells the driver about it afterwards.

Runs on: worker 0's Spark task, in the driver's place (record); driver (replay).
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import IO, Any, Final

from dbx_tf.driver.journal import NullJournal
from dbx_tf.driver.launch import CANCEL_SECONDS, Deputy, LocalLauncher, Take
from dbx_tf.driver.mlflow_calls import Snapshot, WorkerCalls
from dbx_tf.driver.supervisor import Supervisor
from dbx_tf.driver.tracker import NullTracker
from dbx_tf.errors import ClusterError, Failure
from dbx_tf.wire import events
from dbx_tf.wire.channel import ChannelAddress, Connection, connect, read_message
from dbx_tf.worker.scratch import scratch_folder
from dbx_tf.worker.task import Program

_CHUNK_BYTES: Final = 1 << 20
_NO_MODELS: Final = (
    "a model that train_fn logs with MLflow itself is not logged, since the workers can't reach the driver; return the "
    "model from train_fn: dbx_tf logs it"
)


def record(program: Program, deputy: Deputy) -> Iterator[bytes]:
    """Be one worker; the first one leads all of them, and yields what they have said, as `replay` takes it."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    place = program.find_place()
    if place.worker_index != 0:
        address = ChannelAddress(**json.loads(context.allGather("")[0]))
        _agree(context, address, place.worker_index)
        # When it is told to stop, worker 0 yields the reason, which an error here would take away.
        with contextlib.suppress(RuntimeError):
            replace(program, address=address)()
        return
    with scratch_folder() as folder:
        file = folder / "events"
        launcher = LocalLauncher([place])
        with file.open("wb") as target:
            recorder = _Recorder(launcher, program.num_workers, deputy, target)
            context.allGather(json.dumps(asdict(recorder.address)))
            _agree(context, recorder.address, 0)
            recorder.lead(replace(program, address=recorder.address))
        with file.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk


def _agree(context: Any, address: ChannelAddress, worker_index: int) -> None:
    """Find out whether all workers reach the first one; if not, all raise, since one that waits would be killed."""
    error = ""
    try:
        connect(address, worker_index, events.Role.TASK).close()
    except ClusterError as refused:
        error = str(refused)
    if errors := [text for text in context.allGather(error) if text]:
        raise ClusterError(errors[0])


class _Recorder(Supervisor):
    """A supervisor that keeps all that it is told."""

    def __init__(self, launcher: LocalLauncher, num_workers: int, deputy: Deputy, file: IO[bytes]) -> None:
        self._own, self._deputy, self._file = launcher, deputy, file
        self._recording = threading.Lock()
        tracker = _Answers(deputy.snapshot) if deputy.snapshot else NullTracker()
        journal = NullJournal()
        super().__init__(launcher, num_workers, deputy.versions, journal, tracker, deputy.payload, deputy.limits)

    def lead(self, program: Program) -> None:
        """Run worker 0 here and lead all workers, until all have ended."""
        self._own.start(program, lambda: self._deputy, self.take)
        failure = self.wait(lambda topology: None).failure
        if failure is not None:
            self.stop(failure.cause_message)
            self._record(*_as_event(failure))  # what nobody said, such as a silent worker
        self._own.finish()
        deadline = time.monotonic() + CANCEL_SECONDS
        while self.has_connections and time.monotonic() < deadline:
            time.sleep(0.1)
        self.close()

    def take(
        self, hello: events.Hello, event: events.Event, body: IO[bytes], connection: Connection | None = None
    ) -> None:
        """Record an event, and act on it."""
        is_call = isinstance(event, events.Call) and "logged_model" in event.method
        if is_call or (isinstance(event, events.Upload) and "/model/" in event.artifact_uri):
            self._record(hello, events.Notice(text=_NO_MODELS))
        else:
            self._record(hello, event, body)
        super().take(hello, event, body, connection)

    def _record(self, hello: events.Hello, event: events.Event, body: IO[bytes] | None = None) -> None:
        body = body or io.BytesIO()
        size = body.seek(0, io.SEEK_END)
        body.seek(0)
        with self._recording:
            self._file.write(events.encode(replace(hello, token=""), 0))
            self._file.write(events.encode(event, size))
            shutil.copyfileobj(body, self._file, _CHUNK_BYTES)
        body.seek(0)


class _Answers(NullTracker):
    """Answers what user code asks MLflow, as the driver would have at the start; the driver logs it afterwards."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._calls = WorkerCalls(snapshot, snapshot.run_id, snapshot.experiment_id)

    def answer(self, worker_index: int, call: events.Call, arguments: tuple[Any, ...]) -> Any:
        """See `Tracker.answer`."""
        return self._calls.answer(worker_index, call.method, *arguments)

    def upload(self, worker_index: int, upload: events.Upload, body: IO[bytes]) -> None:
        """Nothing: the file is recorded."""


def replay(chunks: Iterable[bytes], take: Take) -> None:
    """Bring what was recorded to the driver's supervisor, event by event."""
    with tempfile.TemporaryFile() as file:
        for chunk in chunks:
            file.write(chunk)
        size = file.tell()
        file.seek(0)
        while file.tell() < size:
            hello, _ = read_message(file)
            event, body = read_message(file)
            assert isinstance(hello, events.Hello)
            take(hello, event, body)


def tell(text: str, take: Take) -> None:
    """Show a sentence at the driver."""
    take(events.Hello(token="", worker_index=0, role=events.Role.TASK), events.Notice(text=text), io.BytesIO())


def _as_event(failure: Failure) -> tuple[events.Hello, events.Event]:
    hello = events.Hello(token="", worker_index=failure.worker_index or 0, role=events.Role.TASK)
    cause = events.Failed(
        cause_type=failure.cause_type,
        cause_message=failure.cause_message,
        traceback=failure.traceback,
        is_echo=False,
    )
    return hello, cause
