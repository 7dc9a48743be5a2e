"""Two hosts with names and addresses of their own: network namespaces on this machine, and a standalone Spark."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import run_script
from .standalone import Cluster
from .two_hosts import DRIVER, NEEDS_ROOT, NETWORK, two_host_cluster, two_hosts

pytestmark = NEEDS_ROOT


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with two_hosts() as links, two_host_cluster(tmp_path / "cluster", links) as cluster:
        yield cluster


def test_both_servers_train(cluster: Cluster, store: str, tmp_path: Path, fresh_python: Callable[..., Any]) -> None:
    """The answer to the question: two workers on two hosts, each with its own name, address and executor."""
    answers = run_script("hosts.py", cluster.master, DRIVER, store, folder=tmp_path)
    assert answers["topology"] == "2 workers on 2 hosts, 2 replicas in sync"
    assert answers["hosts"] == ["server-1", "server-2"]
    assert answers["addresses"] == [f"{NETWORK}.11", f"{NETWORK}.12"]
    assert answers["executors"] == ["0", "1"]
    assert answers["notices"] == []
    assert "2 hosts, 2 executors, 2 cores" in answers["plan"]
    assert "no problems found" in answers["plan"]
    assert answers["plan_hosts"] == ["server-1", "server-2"]
    assert "1 worker on a cluster of 2 servers: 1 will stand idle" in answers["plan_of_one_slot"]
    assert "local_mode=True trains on the driver's machine alone, while 2 servers" in answers["plan_of_local_mode"]
    assert answers["model_uri"].startswith("models:/m-")
    alone = fresh_python("import train_fns\nvalue = train_fns.fit_and_return_weights()['history']['loss']")
    assert answers["loss"] == pytest.approx(alone, abs=1e-5)
