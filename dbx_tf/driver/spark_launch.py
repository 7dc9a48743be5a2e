"""Starts one Spark barrier task per worker: through MirroredStrategyRunner, or through Spark Connect.

Runs on: driver; what Spark Connect ships (_task, _probe) on workers.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import socket
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from dbx_tf.driver.launch import CANCEL_SECONDS, LOCAL_IP, Deputy, MakeDeputy, Take
from dbx_tf.driver.recorder import record, replay, tell
from dbx_tf.errors import ClusterError
from dbx_tf.wire.channel import ChannelAddress, connect
from dbx_tf.wire.events import Role
from dbx_tf.worker.probe import Finding, Probe
from dbx_tf.worker.task import Program

_PROBE_SECONDS: Final = 5.0
_MAX_SHIPPED_BYTES: Final = 64 << 20
"""More than that in a command of Spark Connect can end a JVM of Spark's default size (1 GB)."""
_NOT_LIVE: Final = (
    "the workers can't reach this machine: what they print, their metrics and the model come when training has ended"
)
_TOO_LARGE: Final = (
    "train_fn and its arguments have {} MB, but the workers can't fetch them from this machine; Spark Connect ships at "
    "most {} MB; write the data to files that the workers can read, such as a volume, or run this on the cluster"
)
_MISSING: Final = re.compile("No module named '(dbx_tf|spark_tensorflow_distributor)")
_NOT_INSTALLED: Final = (
    "the workers' Python has no package {}: install dbx-tf on every server, as a library of the cluster or of the job, "
    "or in the notebook by %pip install, before the Spark session is used"
)


class _SparkJob(ABC):
    """A Spark job in a thread, which leaves the caller's thread free for a Ctrl-C."""

    host: str
    bind_host: str
    has_servers: bool
    is_live = True

    def __init__(self, spark: Any, num_tasks: int) -> None:
        self._spark, self._num_tasks = spark, num_tasks
        self._group = f"dbx_tf-{uuid.uuid4().hex[:12]}"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @abstractmethod
    def _run(self, program: Program, make_deputy: MakeDeputy, take: Take) -> None:
        """Run the job to its end."""

    @abstractmethod
    def _ask(self, probe: Probe) -> list[Finding]:
        """Run a job of as many tasks that looks around."""

    @abstractmethod
    def _cancel(self) -> None:
        """Have Spark end the job."""

    def start(self, program: Program, make_deputy: MakeDeputy, take: Take) -> None:
        """Start the barrier job; see `Launcher`."""
        self._begin(lambda: self._run(program, make_deputy, take))

    def _begin(self, work: Callable[[], None]) -> None:
        from pyspark import InheritableThread  # takes the caller's Spark pool and description along

        self._thread = InheritableThread(target=self._keep_error, args=(work,), session=self._spark)
        self._thread.daemon = True
        self._thread.start()

    def _keep_error(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # it is told by the thread that waits
            self._error = error

    def is_running(self) -> bool:
        """True until the barrier job has ended."""
        return self._thread is not None and self._thread.is_alive()

    def error(self) -> BaseException | None:
        """Spark's error, shortened to what a person can use."""
        if self._error is None or isinstance(self._error, ClusterError):
            return self._error
        if missing := _MISSING.search(str(self._error)):
            return ClusterError(_NOT_INSTALLED.format(missing.group(1)))
        return RuntimeError(_first_python_error(str(self._error)))

    def finish(self) -> None:
        """Wait for the job to end; cancel it if a task does not react."""
        if self._thread is None:
            return
        if self.is_live:  # else nobody can tell the tasks to end
            self._thread.join(CANCEL_SECONDS / 2)
        self._end()

    def _end(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._cancel()
            self._thread.join(CANCEL_SECONDS)

    def collect(self, probe: Probe, seconds: float) -> list[Finding]:
        """Look around on all workers; see `Launcher`."""
        found: list[Finding] = []
        self._begin(lambda: found.extend(self._ask(probe)))
        assert self._thread is not None
        try:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise ClusterError(f"their job did not end in {seconds:g} seconds")
        finally:
            self._end()
        if (error := self.error()) is not None:
            raise ClusterError(str(error))
        return found


class SparkLauncher(_SparkJob):
    """Started by spark-tensorflow-distributor, on a classic Spark session."""

    name = "MirroredStrategyRunner"

    def __init__(self, spark: Any, num_tasks: int) -> None:
        super().__init__(spark, num_tasks)
        self._context = spark.sparkContext
        conf = self._context.getConf()
        self.host = str(conf.get("spark.driver.host", LOCAL_IP)).strip("[]")
        self.bind_host = str(conf.get("spark.driver.bindAddress", self.host)).strip("[]")
        self.has_servers = not self._context.master.startswith("local[")

    def _run(self, program: Program, make_deputy: MakeDeputy, take: Take) -> None:
        self._start_tasks(program, f"dbx_tf: train on {self._num_tasks} workers")

    def _ask(self, probe: Probe) -> list[Finding]:
        found: list[Finding] = self._start_tasks(probe, f"dbx_tf: look around on {self._num_tasks} workers")
        return found

    def _start_tasks(self, function: Callable[[], Any], text: str) -> Any:
        """Call a function in every task; returns the first one's value."""
        from spark_tensorflow_distributor import MirroredStrategyRunner

        self._context.setJobGroup(self._group, text, interruptOnCancel=False)
        # GPUs are assigned by the program itself: the runner picks them at random, and indexes what an earlier
        # run left in CUDA_VISIBLE_DEVICES.
        logging.getLogger(MirroredStrategyRunner.__name__).addFilter(_is_warning)
        runner = MirroredStrategyRunner(num_slots=self._num_tasks, use_gpu=False, use_custom_strategy=True)
        return runner.run(function)

    def _cancel(self) -> None:
        self._context.cancelJobGroup(self._group)


class ConnectLauncher(_SparkJob):
    """Started by a barrier `mapInArrow`: MirroredStrategyRunner needs a SparkContext, which Spark Connect has not."""

    name = "mapInArrow on Spark Connect"

    def __init__(self, spark: Any, num_tasks: int, profile: Any = None) -> None:
        super().__init__(spark, num_tasks)
        self._profile = profile
        self.host = self.bind_host = _own_address(spark)
        self.has_servers = not str(spark.conf.get("spark.master", "")).startswith("local[")

    def _run(self, program: Program, make_deputy: MakeDeputy, take: Take) -> None:
        self.is_live = self._is_reachable(program.address)
        deputy = None if self.is_live else make_deputy()
        if deputy is not None:
            if len(deputy.payload) > _MAX_SHIPPED_BYTES:
                raise ClusterError(_TOO_LARGE.format(len(deputy.payload) >> 20, _MAX_SHIPPED_BYTES >> 20))
            tell(_NOT_LIVE, take)
        replay(self._start_tasks(lambda batches: _task(batches, program, deputy)), take)

    def _ask(self, probe: Probe) -> list[Finding]:
        chunks = list(self._start_tasks(lambda batches: _look(batches, probe)))
        found: list[Finding] = pickle.loads(chunks[0])  # noqa: S301  # all tasks return the same, of our own
        return found

    def _start_tasks(self, function: Callable[[Iterable[Any]], Iterator[Any]]) -> Iterator[bytes]:
        """Call a function in every task, and bring what they yield."""
        self._spark.addTag(self._group)  # for this thread alone
        frame = self._spark.range(0, self._num_tasks, 1, self._num_tasks).mapInArrow(
            function, "chunk binary", barrier=True, profile=self._profile
        )
        # An iterator, since all of it may be larger than what should be in memory at once.
        return (bytes(row.chunk) for row in frame.toLocalIterator())

    def _is_reachable(self, address: ChannelAddress) -> bool:
        frame = self._spark.range(0, 1, 1, 1).mapInArrow(lambda batches: _probe(batches, address), "chunk binary")
        return bool(frame.collect())

    def _cancel(self) -> None:
        self._spark.interruptTag(self._group)


def _probe(batches: Iterable[Any], address: ChannelAddress) -> Iterator[Any]:
    """One row if the driver can be reached from this worker, else none."""
    for _ in batches:
        pass
    with contextlib.suppress(ClusterError):
        connect(address, 0, Role.TASK, timeout_seconds=_PROBE_SECONDS).close()
        yield _batch(b"reached")


def _task(batches: Iterable[Any], program: Program, deputy: Deputy | None) -> Iterator[Any]:
    """One worker; yields what was recorded, if the driver can't be reached."""
    for _ in batches:
        pass
    if deputy is None:
        program()
    else:
        yield from map(_batch, record(program, deputy))


def _look(batches: Iterable[Any], probe: Probe) -> Iterator[Any]:
    """What all workers found, from each of them."""
    for _ in batches:
        pass
    yield _batch(pickle.dumps(probe()))


def _batch(chunk: bytes) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([chunk], type=pa.binary())], names=["chunk"])


def _own_address(spark: Any) -> str:
    """The address of this machine that Spark's workers most likely reach; whether they do is probed."""
    candidates = [str(spark.conf.get("spark.driver.host", "")).strip("[]")]  # in a notebook of the cluster's own
    with contextlib.suppress(OSError, AttributeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((spark.client.host, 9))  # sends nothing; the system chooses the address for that route
        candidates.append(sock.getsockname()[0])
    for host in filter(None, candidates):
        with contextlib.suppress(OSError), socket.create_server((host, 0)):
            return host
    return LOCAL_IP


def _is_warning(record: logging.LogRecord) -> bool:
    """Keeps back what the runner says at level INFO: it knows nothing of GPUs, and sends people to executor logs."""
    return record.levelno >= logging.WARNING


def _first_python_error(text: str) -> str:
    """The last line of the first Python traceback in a JVM error, or what the JVM says."""
    marker = "Traceback (most recent call last):"
    if marker not in text:
        said = [line for line in text.splitlines() if line.strip() and not line.startswith("An error occurred while")]
        return re.sub(r"^:? ?([\w$]+\.)+\w+: ", "", said[0]).strip() if said else "Spark ended the job"
    block = text.partition(marker)[2].split("\n\n")[0].split("\n\tat ")[0]
    lines = [line for line in block.splitlines() if line and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else text.splitlines()[0]
