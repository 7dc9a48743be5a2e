"""Slots, TF_CONFIG, addresses, batches and the topology's words."""

import json

import pytest

from dbx_tf.cluster import (
    SlotLayout,
    Topology,
    WorkerInfo,
    join_address,
    layout_slots,
    per_replica_batch_size,
    split_address,
    tf_config,
)
from dbx_tf.errors import ConfigError


def worker(index: int, host: str, executor: str = "0", address: str = "10.0.0.1:1") -> WorkerInfo:
    return WorkerInfo(index, host, address, executor, 100 + index, ("/device:CPU:0",), 1)


@pytest.mark.parametrize(
    ("num_slots", "gpus_per_task", "expected"),
    [
        (4, 0, SlotLayout(4, 0)),
        (2, 1, SlotLayout(2, 1)),
        (4, 2, SlotLayout(2, 2)),
        (6, 4, SlotLayout(2, 3)),
        (1, 4, SlotLayout(1, 1)),
        (8, 4, SlotLayout(2, 4)),
    ],
)
def test_layout_slots_gives_equal_workers(num_slots: int, gpus_per_task: int, expected: SlotLayout) -> None:
    """Slots become tasks with the same number of GPUs each."""
    assert layout_slots(num_slots, gpus_per_task) == expected


def test_layout_slots_refuses_an_uneven_split() -> None:
    """Five slots on tasks of two GPUs would give workers of 2, 2 and 1."""
    with pytest.raises(ConfigError, match=r"num_slots=5.*3 tasks of 2 GPUs.*num_slots=4 or 6"):
        layout_slots(5, 2)


def test_per_replica_batch_size_divides() -> None:
    """A global batch is split evenly."""
    assert per_replica_batch_size(64, 4) == 16


@pytest.mark.parametrize(("size", "replicas", "nearest"), [(65, 4, "64 and 68"), (3, 4, "are 4;"), (0, 4, "are 4;")])
def test_per_replica_batch_size_names_the_nearest(size: int, replicas: int, nearest: str) -> None:
    """A batch that does not divide is refused with the sizes that would."""
    with pytest.raises(ConfigError, match=nearest):
        per_replica_batch_size(size, replicas)


def test_tf_config_is_the_documented_form() -> None:
    """TF_CONFIG lists equal workers and says which one this is."""
    assert json.loads(tf_config(("10.0.0.1:5000", "10.0.0.2:5001"), 1)) == {
        "cluster": {"worker": ["10.0.0.1:5000", "10.0.0.2:5001"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize(
    ("address", "parts"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("[fd00::2]:33749", ("fd00::2", 33749)), ("host:1", ("host", 1))],
)
def test_addresses_round_trip(address: str, parts: tuple[str, int]) -> None:
    """Addresses split and join, IPv6 with brackets."""
    assert split_address(address) == parts
    assert join_address(*parts) == address


def test_topology_counts_and_says_them() -> None:
    """Two workers on two hosts are told as such, and there is nothing to advise."""
    topology = Topology((worker(0, "a"), worker(1, "b", "1", "10.0.0.2:1")), 2)
    assert str(topology) == "2 workers on 2 hosts, 2 replicas in sync"
    assert topology.advice() is None
    document = json.loads(topology.to_json())
    assert document["num_hosts"] == 2
    assert [w["host"] for w in document["workers"]] == ["a", "b"]


def test_topology_tells_why_a_server_is_idle() -> None:
    """Two workers in one executor: the advice names the host, the cause and the setting."""
    topology = Topology((worker(0, "a"), worker(1, "a")), 2)
    assert str(topology) == "2 workers on 1 host, 2 replicas in sync"
    advice = topology.advice() or ""
    assert "2 workers are on one host (2 on a), because Spark fills" in advice
    assert "spark.task.cpus" in advice


def test_topology_knows_two_machines_of_one_name() -> None:
    """Machines that are all called localhost differ by their address."""
    assert Topology((worker(0, "localhost"), worker(1, "localhost", "1", "10.0.0.2:1")), 2).num_hosts == 2
