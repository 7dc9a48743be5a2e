"""Two hosts with names and addresses of their own: network namespaces on this machine, and a standalone Spark."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import run_script
from .standalone import Cluster, standalone

NETWORK = "10.77.0"
DRIVER = f"{NETWORK}.1"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="making network namespaces needs root, and the commands ip and unshare",
)


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
    with two_hosts() as hosts, standalone(tmp_path / "cluster", DRIVER) as cluster:
        for index, name in enumerate(hosts, 1):
            enter = ["ip", "netns", "exec", name, "unshare", "-u"]
            cluster.start_worker(name, f"{NETWORK}.1{index}", 1, enter, f"hostname server-{index}")
        cluster.wait_for_workers(2)
        yield cluster


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
