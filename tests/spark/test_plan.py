"""The plan on real sessions: what it shows, what it finds, and what the workers say when they are asked."""

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_tf import ClusterError, ConfigError, Runner, Tracking, TrackingError

from . import train_fns
from .conftest import CLASSIC

OFF = Tracking(enabled=False)


def reads(path: str, batch_size: int = 64) -> str:
    """A train_fn with a path and a batch size."""
    return path * batch_size


def test_a_plan_shows_the_cluster(spark: Any) -> None:
    """Hosts, executors, cores, slots, workers, replicas and batches are told, as far as the session tells them."""
    plan = Runner(num_slots=2, tracking=OFF).plan(reads, path="x", batch_size=33)
    text = str(plan)
    assert plan.problems == ()
    assert (plan.slots_available, plan.num_workers, plan.num_replicas, plan.cores) == (3, 2, 2, 3)
    assert (plan.num_hosts, plan.num_executors) == (1, 1)
    assert (plan.global_batch_size, plan.per_replica_batch_size) == (33, 17)
    assert "1 host, 1 executor, 3 cores" in text
    assert "33 rows a step, 17 on each replica" in text
    assert "no problems found" in text


def test_workers_are_asked(spark: Any, tmp_path: Path) -> None:
    """A probe tells what is on every worker; a good cluster has no problem, and is as it was before."""
    plan = Runner(num_slots=2, tracking=OFF).plan(reads, probe=True, path=str(tmp_path))
    assert [problem for problem in plan.problems if problem.level == "error"] == []
    assert [finding.worker_index for finding in plan.findings] == [0, 1]
    for finding in plan.findings:
        assert {**finding.versions, **plan.versions} == finding.versions
        assert "protobuf" in finding.versions
        assert (finding.tensorflow_error, finding.peer_error, finding.driver_error) == ("", "", "")
        assert (finding.num_gpus, finding.missing_paths) == (0, [])
        assert finding.free_disk_bytes > 0
    assert str(plan).count("GiB free on its disk") == 2


def test_a_probe_tells_what_workers_lack(spark: Any) -> None:
    """TensorFlow that can't be imported there is an error of each worker, in one plan, and refuses the run."""
    runner = Runner(num_slots=2, tracking=OFF, env={"PYTHONHASHSEED": "no number"})
    plan = runner.plan(probe=True)
    assert [problem.level for problem in plan.problems] == ["error", "error"]
    assert "can't import TensorFlow" in plan.problems[0].what
    with pytest.raises(ClusterError, match=r"(?s)worker 0.*worker 1"):
        plan.check()


def test_a_probe_has_a_deadline(spark: Any) -> None:
    """Workers that do not answer are told, and their job is ended."""
    plan = Runner(num_slots=2, tracking=OFF, start_timeout_seconds=0.1).plan(probe=True)
    (problem,) = plan.problems
    assert "did not end in 0.1 seconds" in problem.what
    assert Runner(num_slots=2, tracking=OFF).run(train_fns.no_training).topology.num_workers == 2


def test_a_probe_looks_around_here_too() -> None:
    """Local mode and a run in this process have one place to look at."""
    for settings in ({"local_mode": True, "num_slots": 2}, {"in_process": True, "num_slots": 1}):
        plan = Runner(**settings, tracking=OFF).plan(probe=True)  # type: ignore[arg-type]
        assert plan.problems == ()
        assert len(plan.findings) == 1


@CLASSIC
def test_an_autoscaling_cluster_is_told(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Databricks marks it; a cluster of fixed size is fine."""
    from dbx_tf.driver.spark_session import ClassicSession

    original = ClassicSession.get
    for value, number in (("autoscaling", 1), ("fixed_size", 0)):
        tag = {"spark.databricks.clusterUsageTags.clusterScalingType": value}
        monkeypatch.setattr(ClassicSession, "get", lambda self, key, tag=tag: tag.get(key) or original(self, key))
        assert [p.what for p in Runner(num_slots=2, tracking=OFF).plan().problems] == [
            "this cluster autoscales"
        ] * number


@pytest.fixture
def refusing_server() -> Iterator[str]:
    """A tracking server that takes nobody's credentials."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401, "no such user")

        do_POST = do_GET  # noqa: N815  # the base class names it so

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_tracking_server_that_refuses_is_in_the_plan(refusing_server: str) -> None:
    """Unauthenticated and unreachable servers are errors of the plan, beside all others."""
    for uri, text in ((refusing_server, "401"), ("http://127.0.0.1:9", "Max retries")):
        runner = Runner(num_slots=2, local_mode=True, tracking=Tracking(tracking_uri=uri))
        (problem,) = runner.plan().problems
        assert "does not take a run" in problem.what
        assert text in problem.what
        with pytest.raises(TrackingError, match="does not take a run"):
            runner.run(train_fns.no_training)
    runner = Runner(num_slots=2, local_mode=True, use_gpu=True, tracking=Tracking(tracking_uri=refusing_server))
    with pytest.raises(ClusterError, match=r"(?s)1\. .*does not take a run.*2\. .*use_gpu=True"):
        runner.run(train_fns.no_training)


@CLASSIC
def test_hosts_that_are_not_there_are_refused(spark: Any) -> None:
    """One host can't be two."""
    with pytest.raises(ConfigError, match="needs a slot"):
        Runner(num_slots=2, require_hosts=3, tracking=OFF).run(train_fns.no_training)
    with pytest.raises(ClusterError, match=r"require_hosts=2; the cluster has 1 host"):
        Runner(num_slots=2, require_hosts=2, tracking=OFF).run(train_fns.no_training)


@CLASSIC
def test_workers_that_land_on_too_few_hosts_do_not_train(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the session does not tell its hosts, the workers do: it is refused within seconds, before TensorFlow."""
    from dbx_tf.driver.spark_session import ClassicSession

    monkeypatch.setattr(ClassicSession, "is_local", False)
    monkeypatch.setattr(ClassicSession, "executors", lambda _: None)
    started = time.monotonic()
    with pytest.raises(ClusterError, match=r"require_hosts=2, but 2 workers are on one host.*spark\.task\.cpus"):
        Runner(num_slots=2, require_hosts=2, tracking=OFF).run(train_fns.no_training)
    assert time.monotonic() - started < 20
    with pytest.raises(ConfigError, match="does not tell how many hosts"):
        Runner(num_slots=2, require_hosts="all", tracking=OFF).run(train_fns.no_training)
