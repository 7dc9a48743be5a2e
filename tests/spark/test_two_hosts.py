"""Two hosts with names and addresses of their own: network namespaces on this machine, and a standalone Spark."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .conftest import run_script, spark_home

NETWORK = "10.77.0"
DRIVER = f"{NETWORK}.1"
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="making network namespaces needs root, and the commands ip and unshare",
)


@dataclass
class Cluster:
    """A master in the default namespace and a worker in each of two others."""

    folder: Path
    port: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def master(self) -> str:
        return f"spark://{DRIVER}:{self.port}"

    def start(self, name: str, command: list[str], address: str) -> None:
        """Start a process of the cluster; its output goes to a log."""
        env = {**os.environ, "SPARK_LOCAL_IP": address, "SPARK_HOME": str(self.folder / "spark_home")}
        env |= {"SPARK_DAEMON_JAVA_OPTS": JVM, "SPARK_WORKER_DIR": str(self.folder / name)}
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)

    def wait_for(self, text: str, count: int) -> None:
        """Wait until the master's log has a text so many times."""
        log = self.folder / "master.log"
        deadline = time.monotonic() + 120
        while log.read_text().count(text) < count:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=30)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces on a bridge; yields their names."""
    names = [f"dbxtf{os.getpid()}w{index}" for index in (1, 2)]
    bridge = f"dbxtf{os.getpid() % 100000}"
    try:
        ip(f"link add {bridge} type bridge")
        ip(f"addr add {DRIVER}/24 dev {bridge}")
        ip(f"link set {bridge} up")
        for index, name in enumerate(names, 1):
            ip(f"netns add {name}")
            ip(f"link add {bridge}v{index} type veth peer name eth0 netns {name}")
            ip(f"link set {bridge}v{index} master {bridge} up")
            ip(f"-n {name} addr add {NETWORK}.1{index}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=30, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", bridge], check=False, timeout=30, stderr=subprocess.DEVNULL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    home = spark_home(folder)
    spark_class = str(home / "bin" / "spark-class")
    cluster = Cluster(folder)
    with two_hosts() as hosts:
        try:
            with socket.create_server((DRIVER, 0)) as free:
                cluster.port = free.getsockname()[1]
            master = ["org.apache.spark.deploy.master.Master", "--host", DRIVER, "--port", str(cluster.port)]
            cluster.start("master", [spark_class, *master, "--webui-port", "0"], DRIVER)
            cluster.wait_for("I have been elected leader", 1)
            for index, name in enumerate(hosts, 1):
                address = f"{NETWORK}.1{index}"
                worker = (
                    f"org.apache.spark.deploy.worker.Worker --host {address} --webui-port 0 -c 1 -m 2g {cluster.master}"
                )
                shell = f"hostname server-{index}; exec {spark_class} {worker}"
                cluster.start(name, ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", shell], address)
            cluster.wait_for("Registering worker", 2)
            yield cluster
        finally:
            for process in cluster.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def test_both_servers_train(cluster: Cluster, store: str, tmp_path: Path, fresh_python: Callable[..., Any]) -> None:
    """The answer to the question: two workers on two hosts, each with its own name, address and executor."""
    answers = run_script("hosts.py", cluster.master, DRIVER, store, folder=tmp_path)
    assert answers["topology"] == "2 workers on 2 hosts, 2 replicas in sync"
    assert answers["hosts"] == ["server-1", "server-2"]
    assert answers["addresses"] == [f"{NETWORK}.11", f"{NETWORK}.12"]
    assert answers["executors"] == ["0", "1"]
    assert answers["notices"] == []
    assert answers["model_uri"].startswith("models:/m-")
    alone = fresh_python("import train_fns\nvalue = train_fns.fit_and_return_weights()['history']['loss']")
    assert answers["loss"] == pytest.approx(alone, abs=1e-5)
