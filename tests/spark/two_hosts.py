"""Two hosts with names and addresses of their own: network namespaces on this machine, and a standalone Spark."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .standalone import Cluster, standalone

NETWORK = "10.77.0"
DRIVER = f"{NETWORK}.1"
NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="making network namespaces needs root, and the commands ip and unshare",
)


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=30)


@contextlib.contextmanager
def two_hosts() -> Iterator[dict[str, str]]:
    """Two network namespaces on a bridge; yields their names, each with the name of its link's end at the bridge."""
    names = [f"dbxtf{os.getpid()}w{index}" for index in (1, 2)]
    bridge = f"dbxtf{os.getpid() % 100000}"
    links = {name: f"{bridge}v{index}" for index, name in enumerate(names, 1)}
    try:
        ip(f"link add {bridge} type bridge")
        ip(f"addr add {DRIVER}/24 dev {bridge}")
        ip(f"link set {bridge} up")
        for index, (name, link) in enumerate(links.items(), 1):
            ip(f"netns add {name}")
            ip(f"link add {link} type veth peer name eth0 netns {name}")
            ip(f"link set {link} master {bridge} up")
            ip(f"-n {name} addr add {NETWORK}.1{index}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
        yield links
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=30, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", bridge], check=False, timeout=30, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def two_host_cluster(folder: Path, hosts: Iterable[str], num_cores: int = 1) -> Iterator[Cluster]:
    """A standalone Spark with a worker of so many cores on each of the hosts: server-1 and server-2."""
    with standalone(folder, DRIVER) as cluster:
        for index, name in enumerate(hosts, 1):
            enter = ["ip", "netns", "exec", name, "unshare", "-u"]
            cluster.start_worker(name, f"{NETWORK}.1{index}", num_cores, enter, f"hostname server-{index}")
        cluster.wait_for_workers(2)
        yield cluster
