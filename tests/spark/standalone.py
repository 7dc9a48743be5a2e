"""A standalone Spark cluster: a master, and workers started with any command before theirs."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .conftest import spark_home

JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@dataclass
class Cluster:
    """A master on the driver's host, and its workers."""

    folder: Path
    host: str
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def master(self) -> str:
        return f"spark://{self.host}:{self.port}"

    def start_master(self) -> None:
        main = ["org.apache.spark.deploy.master.Master", "--host", self.host, "--port", str(self.port)]
        self._start("master", [self._spark_class, *main, "--webui-port", "0"], self.host)
        self._wait_for("I have been elected leader", 1)

    def start_worker(self, name: str, address: str, num_cores: int, prefix: list[str], prepare: str) -> None:
        """Start a worker: `prefix` enters its namespaces, and a shell runs `prepare` there before the worker."""
        main = f"org.apache.spark.deploy.worker.Worker --host {address} --webui-port 0 -c {num_cores} -m 2g"
        shell = f"{prepare} && exec {self._spark_class} {main} {self.master}"
        self._start(name, [*prefix, "sh", "-c", shell], address)

    def wait_for_workers(self, count: int) -> None:
        self._wait_for("Registering worker", count)

    @property
    def _spark_class(self) -> str:
        return str(spark_home(self.folder) / "bin" / "spark-class")

    def _start(self, name: str, command: list[str], address: str) -> None:
        env = {**os.environ, "SPARK_LOCAL_IP": address, "SPARK_HOME": str(spark_home(self.folder))}
        env |= {"SPARK_DAEMON_JAVA_OPTS": JVM, "SPARK_WORKER_DIR": str(self.folder / name)}
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)

    def _wait_for(self, text: str, count: int) -> None:
        log = self.folder / "master.log"
        deadline = time.monotonic() + 120
        while log.read_text().count(text) < count:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)


@contextlib.contextmanager
def standalone(folder: Path, host: str) -> Iterator[Cluster]:
    """A cluster with a master and no workers yet, which ends with all of them."""
    folder.mkdir()
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    cluster = Cluster(folder, host, port)
    try:
        cluster.start_master()
        yield cluster
    finally:
        for process in cluster.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
