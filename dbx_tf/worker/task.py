"""What one Spark barrier task does: hold a port, start the training process, pass on its output, watch it, end it.

Runs on: workers, in the Spark Python worker (in local mode: in a thread of the driver). Never imports TensorFlow, so
the Python worker, which Spark uses again for other jobs, stays as it was.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final

from dbx_tf.cluster import join_address, split_address, tf_config
from dbx_tf.wire.channel import ChannelAddress, Connection, Outbox, connect, save_body
from dbx_tf.wire.events import (
    RELAY_SCHEME,
    Doing,
    Event,
    Exited,
    Failed,
    Inspect,
    Inspected,
    Joined,
    Rejoin,
    Role,
    Start,
    Stop,
)
from dbx_tf.worker import environment
from dbx_tf.worker.inspection import count_oom_kills, inspect
from dbx_tf.worker.output import LOG_TAIL_LINES, pump_output
from dbx_tf.worker.peers import find_unreachable
from dbx_tf.worker.process import PORT_TAKEN_EXIT_CODE, Job, train
from dbx_tf.worker.scratch import scratch_folder

_ENTRY: Final = "import sys; from dbx_tf.worker.process import main; sys.exit(main(sys.argv[1]))"
_LOG_BACKLOG_EVENTS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs."""

    worker_index: int
    ip: str
    executor: str
    gpus: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Ended:
    """The training process of an attempt is gone."""

    attempt: int
    exit_code: int


class _Inbox:
    """What happens to a worker: the driver's commands, and the end of its training process."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Event | _Ended, IO[bytes]]] = queue.Queue()
        self.process: tuple[int, Path] | None = None
        """Process id and folder of the training process that runs."""

    def put(self, item: Event | _Ended, body: IO[bytes] | None = None) -> None:
        """Add a command with its body, or the end of a training process."""
        self._queue.put((item, body or io.BytesIO()))

    def get(self, attempt: int) -> tuple[Event | _Ended, IO[bytes]]:
        """Wait for the next item that concerns this attempt, and its body."""
        while isinstance((item := self._queue.get())[0], _Ended) and item[0].attempt != attempt:
            pass
        return item


@dataclass(frozen=True, slots=True)
class Program:
    """All that a task needs, in one object that is pickled to it."""

    address: ChannelAddress
    num_workers: int
    gpus_per_worker: int
    gpu_resource_name: str
    env: dict[str, str] = field(repr=False)
    """Added to the environment of the training process."""
    python_path: tuple[str, ...]
    """The driver's sys.path: what of it exists here is searched last."""
    seed: int
    export_model: bool
    mlflow_addresses: tuple[str, ...]
    """Addresses of MLflow's that the driver logs to; what train_fn logs there goes through the driver."""
    echo: bool
    """Print the training process's output here as well, for the executor's own log."""

    def __call__(self) -> None:
        """Be the worker of the barrier task that this is called in (by MirroredStrategyRunner, as its train_fn)."""
        try:
            run_worker(self, self.find_place())
        finally:
            environment.restore()

    def find_place(self) -> Place:
        """Where the barrier task that this is called in runs."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        index = context.partitionId()
        address = context.getTaskInfos()[index].address
        found = re.search(r"executorId=([^&]+)", os.environ.get("SPARK_LOG_URL_STDERR", ""))
        place = Place(index, split_address(address)[0], executor=found.group(1) if found else address)
        if not self.gpus_per_worker:
            return place
        resource = context.resources().get(self.gpu_resource_name)
        # In numerical order, so that a run on the same servers uses the same devices in the same order.
        gpus = sorted(resource.addresses if resource else (), key=lambda a: (len(a), a))
        if len(gpus) < self.gpus_per_worker:
            error = f"Spark gave this task the GPUs {gpus}, but it needs {self.gpus_per_worker}"
            return replace(place, error=error)
        return replace(place, gpus=tuple(environment.visible(gpus)[: self.gpus_per_worker]))


def run_worker(program: Program, place: Place) -> None:
    """Run one worker to its end.

    Raises:
        ClusterError: If the driver can't be reached.
        RuntimeError: If the run was stopped; the driver knows the cause, the text here is for Spark's own pages.
    """
    connection = connect(program.address, place.worker_index, Role.TASK)
    inbox = _Inbox()
    threading.Thread(target=_listen, args=(connection, inbox), name="dbx_tf-commands", daemon=True).start()
    logs = Outbox(connection, max_events=_LOG_BACKLOG_EVENTS)
    try:
        attempt: int | None = 1
        while attempt is not None:
            attempt = _run_attempt(program, place, connection, logs, inbox, attempt)
    finally:
        connection.close()


def _run_attempt(
    program: Program, place: Place, connection: Connection, logs: Outbox, inbox: _Inbox, attempt: int
) -> int | None:
    """One start of the training process. Returns the number of the next attempt, or None when all is done."""
    with held_port(place.ip) as port, scratch_folder() as folder:
        connection.send(_joined(place, attempt, port))
        command, payload = inbox.get(attempt)
        if not isinstance(command, Start):
            return _obey(command)
        if error := find_unreachable(command.addresses, place.worker_index):
            connection.send(Failed(cause_type="ClusterError", cause_message=error, traceback="", is_echo=False))
            return _obey(inbox.get(attempt)[0])
        (folder / "job.pkl").write_bytes(pickle.dumps(_job(program, place, attempt)))
        save_body(payload, folder / "payload.pkl")
        num_oom_kills = count_oom_kills()
        child = _start(program, place, command.addresses, folder)
        inbox.process = child.pid, folder
        tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        pump = threading.Thread(
            target=pump_output, args=(child.stdout, tail, logs, program.echo), name="dbx_tf-output", daemon=True
        )
        pump.start()
        threading.Thread(
            target=lambda: inbox.put(_Ended(attempt, child.wait())), name="dbx_tf-wait", daemon=True
        ).start()
        try:
            ended, _ = inbox.get(attempt)
            if not isinstance(ended, _Ended):
                return _obey(ended)
            _end(child)  # what the process itself started may still hold its output
            pump.join(5)
            if ended.exit_code != PORT_TAKEN_EXIT_CODE:
                logs.flush()
                kills = count_oom_kills() - num_oom_kills
                connection.send(Exited(exit_code=ended.exit_code, log_tail=list(tail), num_oom_kills=kills))
            return None if ended.exit_code == 0 else _obey(inbox.get(attempt)[0])
        finally:
            inbox.process = None
            if child.returncode is None:  # else its number may belong to somebody else by now
                _end(child)
            pump.join(5)
            if child.stdout is not None and not pump.is_alive():
                child.stdout.close()


def run_here(program: Program, place: Place) -> None:
    """Be the only worker of a run in this very process, without a training process: for a debugger."""
    connection = connect(program.address, place.worker_index, Role.TASK)
    try:
        connection.send(_joined(place, attempt=1, port=0))
        _, payload = connection.receive()
        with scratch_folder() as folder:
            exit_code = train(_job(program, place, attempt=1), payload.read(), folder)
        connection.send(Exited(exit_code=exit_code, log_tail=[]))
    finally:
        connection.close()


def _joined(place: Place, attempt: int, port: int) -> Joined:
    return Joined(
        attempt=attempt,
        host=socket.gethostname(),
        address=join_address(place.ip, port),
        executor=place.executor,
        versions=environment.package_versions(),
        error=place.error,
    )


def _job(program: Program, place: Place, attempt: int) -> Job:
    return Job(
        worker_index=place.worker_index,
        num_workers=program.num_workers,
        attempt=attempt,
        address=program.address,
        seed=program.seed,
        export_model=program.export_model,
        mlflow_addresses=program.mlflow_addresses,
        parent_pid=os.getpid(),
    )


def _obey(command: Event | _Ended) -> int:
    if isinstance(command, Rejoin):
        return command.attempt
    raise RuntimeError(command.reason if isinstance(command, Stop) else f"unexpected {command!r}")


def _listen(connection: Connection, inbox: _Inbox) -> None:
    while True:
        try:
            command, body = connection.receive()
            if not isinstance(command, Inspect):
                inbox.put(command, body)
            elif inbox.process is not None:
                connection.send(inspect(*inbox.process))
            else:
                connection.send(Inspected(doing=Doing.ABSENT, where="has no training process", stacks=""))
        except (EOFError, OSError):
            inbox.put(Stop(reason="the driver is gone"))
            return


def _start(program: Program, place: Place, addresses: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    env = environment.of_training(program.env, program.python_path, place.gpus) | {
        "TF_CONFIG": tf_config(addresses, place.worker_index),
        "TF_GRPC_REUSE_PORT": "true",  # so that TensorFlow can bind the port that we hold
        "MLFLOW_TRACKING_URI": f"{RELAY_SCHEME}://driver",
        "MLFLOW_REGISTRY_URI": f"{RELAY_SCHEME}://driver",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _ENTRY, str(folder)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a group of its own, to end what it starts; a Ctrl-C at the driver is for the driver
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextmanager
def held_port(ip: str) -> Iterator[int]:
    """A port of this kind of address that nobody else can bind until TensorFlow has.

    It is bound here, not listening, and shared by SO_REUSEPORT; TensorFlow binds it for both kinds of addresses.
    """
    family, any_address = (socket.AF_INET6, "::") if ":" in ip else (socket.AF_INET, "")
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((any_address, 0))
        yield holder.getsockname()[1]
