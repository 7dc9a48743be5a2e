"""Breaks trainings on one Spark session, in the ways asked for; run by test_faults.py.

Usage: faults.py <Spark master> <settings, JSON> <workers> <faults, with commas> <repeats> <file for the answers>

Each fault hits worker 0 first, then worker 1 and so on. That a training gets as far as to be broken shows that the one
before has left the session as it was; the last one is not broken.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train_fns  # beside this file

from dbx_tf import ClusterError, Runner, Tracking, WorkerFailedError

SESSION = f"DBX_TF_TEST_SESSION={os.environ['DBX_TF_TEST_SESSION']}".encode()
CUT_SECONDS = 40.0
"""Longer than everybody needs to notice, shorter than Spark takes to give the executor up."""


def train_until_broken(folder: str, victim: int, how: str) -> None:
    """Train for ever; leave a mark after the first steps; one worker may fail by itself."""
    import time
    from pathlib import Path

    import tensorflow as tf

    from dbx_tf import get_context

    index = get_context().worker_index

    class Breaking(tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                Path(folder, str(index)).touch()
            while epoch >= 1 and not Path(folder, "broken").exists():
                time.sleep(0.01)
            if Path(folder, "broken").exists() and index == victim:
                if how == "raise":
                    raise ValueError("user bug")
                while how == "hang":
                    time.sleep(0.1)
                held = []
                while how == "memory":
                    held.append(b"x" * (1 << 24))
                    time.sleep(0.01)

    x, y = train_fns.make_data()
    train_fns.make_model(tf).fit(x, y, epochs=1_000_000, batch_size=48, verbose=0, callbacks=[Breaking()])


def processes(part: bytes) -> dict[int, dict[bytes, bytes]]:
    """Processes of this test session with this in their command: process id and environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            environ = entry.with_name("environ").read_bytes().split(b"\0")
            if SESSION in environ and part in entry.read_bytes():
                found[int(entry.parent.name)] = dict(line.partition(b"=")[::2] for line in environ)
        except OSError:
            continue  # it has just ended
    return found


def training_process(worker_index: int) -> int:
    """Process id of a worker's training process."""
    return _find(worker_index)[0]


def training_address(worker_index: int) -> str:
    """Address of a worker's host; Spark gives each task to any of the executors."""
    return str(_find(worker_index)[1]["cluster"]["worker"][worker_index]).rpartition(":")[0]


def _find(worker_index: int) -> tuple[int, Any]:
    for pid, environ in processes(b"dbx_tf.worker.process").items():
        config = json.loads(environ[b"TF_CONFIG"])
        if config["task"]["index"] == worker_index:
            return pid, config
    raise AssertionError(f"worker {worker_index} has no training process")


def ancestor(pid: int, part: bytes) -> int:
    """The process above this one that has this in its command."""
    while part not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def cut(link: str) -> None:
    """Take a link down for a while."""
    set_link = ["ip", "link", "set", link]
    subprocess.run([*set_link, "down"], check=True, timeout=30)
    up = threading.Timer(CUT_SECONDS, subprocess.run, args=([*set_link, "up"],), kwargs={"timeout": 30})
    up.start()


def memory_group() -> Path:
    """A cgroup (version 1) for this process's own use."""
    return Path(f"/sys/fs/cgroup/memory/dbx_tf_tests_{os.getpid()}")


def limit_memory(pid: int) -> None:
    """Give a process 200 MB more than it has."""
    group = memory_group()
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    (group / "cgroup.procs").write_text(str(pid))


class Stage:
    """One Spark session, on which trainings are broken."""

    def __init__(self, spark: Any, num_workers: int, links: dict[str, str]) -> None:
        self.spark, self.num_workers, self.links = spark, num_workers, links
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))

    def breaks(self, victim: int) -> dict[str, Callable[[], None]]:
        """How to break a training from outside of it; `raise`, `hang` and `memory` come from train_fn."""
        return {
            "kill": lambda: os.kill(training_process(victim), signal.SIGKILL),
            "stop": lambda: os.kill(training_process(victim), signal.SIGSTOP),
            "memory": lambda: limit_memory(training_process(victim)),
            "executor": lambda: os.kill(
                ancestor(training_process(victim), b"CoarseGrainedExecutorBackend"), signal.SIGKILL
            ),
            "task": lambda: os.kill(ancestor(training_process(victim), b"pyspark"), signal.SIGKILL),
            "link": lambda: cut(self.links[training_address(victim)]),
            "cancel": self.spark.sparkContext.cancelAllJobs,
            "interrupt": lambda: signal.raise_signal(signal.SIGINT),
        }

    def broken(self, how: str, victim: int) -> dict[str, Any]:
        """Break one training; what its caller saw, when, and what was left."""
        marks = Path(tempfile.mkdtemp(dir=self.folder))
        before = self.left()
        broken_at = [0.0]
        breaks = self.breaks(victim)

        def act() -> None:
            while not all((marks / str(index)).exists() for index in range(self.num_workers)):
                time.sleep(0.02)
            time.sleep(0.3)
            broken_at[0] = time.monotonic()
            (marks / "broken").touch()
            time.sleep(0.2)  # the others wait for the victim in a collective, or soon will
            breaks.get(how, lambda: None)()

        threading.Thread(target=act, daemon=True).start()
        runner = Runner(num_slots=self.num_workers, tracking=Tracking(enabled=False), stall_timeout_seconds=15)
        error: Any = None
        try:
            runner.run(train_until_broken, folder=str(marks), victim=victim, how=how)
        except (WorkerFailedError, ClusterError, KeyboardInterrupt) as caught:
            error = caught
        seconds = time.monotonic() - broken_at[0]
        if memory_group().exists():
            memory_group().rmdir()
        fields = ("worker_index", "cause_type", "cause_message", "host", "traceback")
        return {
            "fault": how,
            "victim": victim,
            "error": type(error).__name__,
            "seconds": round(seconds, 1),
            **{name: getattr(error, name, None) for name in fields},
            "left": self.settled(before),
        }

    def settled(self, before: list[str]) -> list[str]:
        """What is there that was not before, once a moment has passed."""
        deadline = time.monotonic() + (CUT_SECONDS + 30 if self.links else 10)
        while (new := sorted(set(self.left()) - set(before))) and time.monotonic() < deadline:
            time.sleep(0.2)
        return new

    def left(self) -> list[str]:
        """Training processes, Spark jobs, listening ports of this process, folders of runs."""
        sockets = {link.rpartition("[")[2][:-1] for fd in Path("/proc/self/fd").iterdir() if (link := _target(fd))}
        ports = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and columns[9] in sockets:
                    ports.append(f"port {int(columns[1].rpartition(':')[2], 16)}")
        tracker = self.spark.sparkContext.statusTracker()
        return [
            *(f"training process {pid}" for pid in processes(b"dbx_tf.worker.process")),
            *(f"Spark job {job}" for job in tracker.getActiveJobsIds()),
            *ports,
            *(str(folder) for folder in Path(tempfile.gettempdir()).glob("dbx_tf-*")),
        ]


def _target(descriptor: Path) -> str:
    try:
        target = str(descriptor.readlink())
    except OSError:
        return ""
    return target if target.startswith("socket:") else ""


def main(master: str, settings: str, num_workers: str, faults: str, repeats: str, out: str) -> None:
    """Break one training after the other, then run one to its end, and write down what happened."""
    from pyspark.sql import SparkSession

    conf = json.loads(settings)
    links = conf.pop("links", {})
    builder = SparkSession.builder.master(master).config(map={"spark.ui.enabled": "false", **conf})
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    count = int(num_workers)
    stage = Stage(spark, count, links)
    answers = []
    for how in faults.split(","):
        for repeat in range(int(repeats)):
            answers.append(stage.broken(how, repeat % count))
            print("broken", json.dumps(answers[-1])[:300], flush=True)
    result = Runner(num_slots=count, tracking=Tracking(enabled=False)).run(train_fns.fit_and_return_weights)
    spark.stop()
    Path(out).write_text(json.dumps({"broken": answers, "loss": result.history["loss"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
