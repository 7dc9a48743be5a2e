"""Starts one task per worker: on Spark through MirroredStrategyRunner, or on the driver's machine.

Runs on: driver.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from typing import Any, Final, Protocol

from dbx_tf.worker.task import Place, Program, run_here, run_worker

_CANCEL_SECONDS: Final = 20.0
_LOCAL_IP: Final = "127.0.0.1"


class Launcher(Protocol):
    """Runs a Program once for each worker, in the background."""

    name: str
    host: str
    """The driver's address, as the tasks see it."""
    bind_host: str
    """The address for the driver to listen on."""
    has_servers: bool
    """True if tasks run on a cluster's servers: they can be spread, and have logs of their own."""

    def start(self, program: Program) -> None:
        """Start all tasks; returns at once."""

    def is_running(self) -> bool:
        """True until all tasks have ended."""

    def error(self) -> BaseException | None:
        """What ended the launch, if it did not end well."""

    def finish(self) -> None:
        """Wait for the tasks to end after they were told to; end them by force if they don't."""


class SparkLauncher:
    """One Spark barrier task per worker, started by spark-tensorflow-distributor on a classic Spark session."""

    name = "MirroredStrategyRunner"

    def __init__(self, spark: Any, num_tasks: int) -> None:
        self._context = spark.sparkContext
        self._num_tasks = num_tasks
        self._group = f"dbx_tf-{uuid.uuid4().hex[:12]}"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        conf = self._context.getConf()
        self.host = str(conf.get("spark.driver.host", _LOCAL_IP)).strip("[]")
        self.bind_host = str(conf.get("spark.driver.bindAddress", self.host)).strip("[]")
        self.has_servers = not self._context.master.startswith("local[")

    def start(self, program: Program) -> None:
        """Start the barrier job in a thread, which leaves this one free for a Ctrl-C."""
        from pyspark import InheritableThread  # takes the caller's Spark pool and description along

        self._thread = InheritableThread(target=self._run, args=(program,), name="dbx_tf-spark", daemon=True)
        self._thread.start()

    def _run(self, program: Program) -> None:
        from spark_tensorflow_distributor import MirroredStrategyRunner

        try:
            self._context.setJobGroup(
                self._group, f"dbx_tf: train on {self._num_tasks} workers", interruptOnCancel=False
            )
            # GPUs are assigned by the program itself: the runner picks them at random, and indexes what an earlier
            # run left in CUDA_VISIBLE_DEVICES.
            logging.getLogger(MirroredStrategyRunner.__name__).addFilter(_is_warning)
            runner = MirroredStrategyRunner(num_slots=self._num_tasks, use_gpu=False, use_custom_strategy=True)
            runner.run(program)
        except BaseException as error:  # noqa: BLE001  # it is told by the thread that waits
            self._error = error

    def is_running(self) -> bool:
        """True until the barrier job has ended."""
        return self._thread is not None and self._thread.is_alive()

    def error(self) -> BaseException | None:
        """Spark's error, shortened to what a person can use."""
        if self._error is None:
            return None
        return RuntimeError(_first_python_error(str(self._error)))

    def finish(self) -> None:
        """Wait for the job to end; cancel it if a task does not react."""
        if self._thread is None:
            return
        self._thread.join(_CANCEL_SECONDS / 2)
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(_CANCEL_SECONDS)


def _is_warning(record: logging.LogRecord) -> bool:
    """Keeps back what the runner says at level INFO: it knows nothing of GPUs, and sends people to executor logs."""
    return record.levelno >= logging.WARNING


def _first_python_error(text: str) -> str:
    """The last line of the first Python traceback in a JVM error, or the error's first line."""
    marker = "Traceback (most recent call last):"
    if marker not in text:
        return text.strip().splitlines()[0] if text.strip() else "Spark ended the job"
    block = text.partition(marker)[2].split("\n\n")[0].split("\n\tat ")[0]
    lines = [line for line in block.splitlines() if line and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else text.splitlines()[0]


class LocalLauncher:
    """One thread per worker in the driver's process, each with its own training process."""

    name = "local"
    host = bind_host = _LOCAL_IP
    has_servers = False

    def __init__(self, num_workers: int, gpus: tuple[str, ...] = ()) -> None:
        per_worker = len(gpus) // num_workers
        self._places = [
            Place(index, _LOCAL_IP, "local", gpus[index * per_worker : (index + 1) * per_worker])
            for index in range(num_workers)
        ]
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, program: Program) -> None:
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
            thread.join(_CANCEL_SECONDS)


class InProcessLauncher:
    """The only worker of a run in the calling process, in the calling thread: for a debugger."""

    name = "in process"
    host = bind_host = _LOCAL_IP
    has_servers = False

    def start(self, program: Program) -> None:
        """Train; returns when training has ended."""
        before = dict(os.environ)
        os.environ.update(program.env)
        try:
            run_here(program, Place(0, _LOCAL_IP, "driver"))
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
