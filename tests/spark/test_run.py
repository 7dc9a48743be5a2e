"""A run on Spark and in local mode: what trains, what comes back, and that it equals one machine."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbx_tf import Runner, Tracking

from . import train_fns

TOLERANCE = 1e-5


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_weights_and_history_equal_one_process(
    spark: Any, tracking: Tracking, fresh_python: Callable[..., Any], keras: str
) -> None:
    """Two epochs on 2 and on 3 workers give the weights and the history of plain Keras in one process."""
    env = {"TF_USE_LEGACY_KERAS": "1" if keras == "tf_keras" else "0"}
    alone = fresh_python("import train_fns\nvalue = train_fns.fit_and_return_weights()", env)
    assert alone["keras"] == keras
    for num_slots in (2, 3):
        result = Runner(num_slots=num_slots, tracking=tracking, env=env).run(train_fns.fit_and_return_weights)
        together = result.value
        assert together["keras"] == keras
        assert result.topology.num_workers == result.topology.num_replicas == num_slots
        differences = [np.abs(a - b).max() for a, b in zip(alone["weights"], together["weights"], strict=True)]
        assert max(differences) <= TOLERANCE
        for name, values in alone["history"].items():
            assert np.abs(np.subtract(values, together["history"][name])).max() <= TOLERANCE
            assert result.history[name] == pytest.approx(values, abs=TOLERANCE)


def test_topology_tells_every_worker(spark: Any, tracking: Tracking) -> None:
    """Each worker has its index, host, address, executor, a process of its own, and its devices."""
    result = Runner(num_slots=2, tracking=tracking).run(train_fns.no_training)
    workers = result.topology.workers
    assert [worker.worker_index for worker in workers] == [0, 1]
    assert {worker.host for worker in workers} == {socket.gethostname()}
    assert len({worker.address for worker in workers}) == 2
    assert len({worker.pid for worker in workers}) == 2
    assert all(worker.num_replicas == 1 and "CPU" in worker.devices[0] for worker in workers)
    assert str(result.topology) == "2 workers on 1 host, 2 replicas in sync"
    assert result.value["pid"] == workers[0].pid
    assert result.model_uri is None


@pytest.mark.parametrize("local_mode", [False, True])
def test_get_context_in_a_run(spark: Any, tracking: Tracking, local_mode: bool) -> None:
    """train_fn can ask for its place, its share of a batch and a folder of its own, which is gone afterwards."""
    seen = Runner(num_slots=2, local_mode=local_mode, tracking=tracking).run(train_fns.no_training).value
    expected = {"worker_index": 0, "num_workers": 2, "num_replicas": 2, "is_chief": True, "per_replica": 32}
    assert {name: seen[name] for name in expected} == expected
    assert seen["scratch_exists"]
    assert not Path(seen["scratch"]).exists()
    assert seen["gpus"] == "-1"
    assert seen["pid"] != os.getpid()


def test_local_mode_needs_no_spark(tracking: Tracking, fresh_python: Callable[..., Any]) -> None:
    """local_mode trains two real processes in an interpreter that never starts Spark."""
    code = f"""
import os, train_fns
from pyspark import SparkContext
from dbx_tf import Runner, Tracking
tracking = Tracking(tracking_uri={tracking.tracking_uri!r})
result = Runner(num_slots=2, local_mode=True, tracking=tracking).run(train_fns.fit_and_return_weights)
pids = {{w.pid for w in result.topology.workers}} - {{os.getpid()}}
value = len(pids), result.history["accuracy"], SparkContext._active_spark_context
"""
    pids, accuracy, context = fresh_python(code)
    assert pids == 2
    assert len(accuracy) == 2
    assert context is None


def test_in_process_runs_where_the_caller_is(tracking: Tracking, fresh_python: Callable[..., Any]) -> None:
    """in_process trains in the calling process, twice, and leaves its environment and TensorFlow's names alone."""
    code = f"""
import os, train_fns
from dbx_tf import Runner, Tracking
before = dict(os.environ)
tracking = Tracking(tracking_uri={tracking.tracking_uri!r})
runner = Runner(num_slots=1, in_process=True, tracking=tracking, env={{"MY_X": "1"}})
first = runner.run(lambda: (os.getpid(), os.environ["MY_X"], train_fns.fit_and_return_weights()["history"]["loss"]))
second = runner.run(train_fns.fit_and_return_model)
import tensorflow as tf
mirrored = type(tf.distribute.MirroredStrategy(["CPU:0"])).__name__
same, unchanged = first.value[0] == os.getpid(), dict(os.environ) == before
value = same, first.value[1], first.model_uri, second.model_uri, unchanged, mirrored
"""
    same, variable, first, second, unchanged, mirrored = fresh_python(code)
    assert (same, variable, unchanged, mirrored) == (True, "1", True, "MirroredStrategy")
    assert first.startswith("models:/m-")
    assert second.startswith("models:/m-")
    assert first != second


def test_a_hundred_megabytes_of_arguments_arrive(spark: Any, tracking: Tracking) -> None:
    """Large arguments reach the workers, and large values come back."""
    data = np.random.RandomState(0).bytes(100 << 20)

    def train_fn(data: bytes) -> bytes:
        return data

    result = Runner(num_slots=2, tracking=tracking).run(train_fn, data=data)
    assert result.value == data


def test_a_lambda_and_a_closure_travel(spark: Any, tracking: Tracking) -> None:
    """Functions without a module of their own are shipped with what they use."""
    offset = np.arange(3)
    multiply: Callable[..., Any] = lambda scale: (offset * scale).tolist()  # noqa: E731  # the subject of the test
    result = Runner(num_slots=1, tracking=tracking).run(multiply, scale=2)
    assert result.value == [0, 2, 4]


def test_an_own_loop_has_metrics_too(spark: Any, tracking: Tracking, client: Any) -> None:
    """Metrics that train_fn logs through the context or returns as lists are in the run."""
    result = Runner(num_slots=2, tracking=tracking).run(train_fns.own_loop)
    assert result.history == {"loss": [3.0, 2.0, 1.0]}
    steps = {m.step: m.value for m in client.get_metric_history(result.run_id, "own")}
    assert steps == {0: 10.0, 1: 11.0, 2: 12.0}
    assert [m.value for m in client.get_metric_history(result.run_id, "loss")] == [3.0, 2.0, 1.0]


def test_every_name_of_a_strategy_gives_the_same(spark: Any, tracking: Tracking) -> None:
    """However train_fn imported a strategy's name, it gets the run's one, and is told what it does not get as asked."""
    import tensorflow as tf

    from dbx_tf import get_context

    mirrored, current = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy
    old = tf.distribute.experimental.MultiWorkerMirroredStrategy
    ring = tf.distribute.experimental.CommunicationImplementation.RING

    def train_fn() -> list[bool]:
        strategy = get_context().strategy
        made = [mirrored(), current(), old(ring)]
        return [*(each is strategy for each in made), isinstance(strategy, current)]

    result = Runner(num_slots=2, tracking=tracking).run(train_fn)
    assert result.value == [True] * 4
    assert len(result.notices) == 2
    assert "MirroredStrategy, which never leaves its server" in result.notices[0]
    assert "have no effect" in result.notices[1]


def test_a_second_fit_continues_the_metrics(spark: Any, tracking: Tracking, client: Any) -> None:
    """Two fits in one train_fn are one series of epochs; a model that can't be saved keeps its weights in the run."""
    result = Runner(num_slots=2, tracking=tracking).run(train_fns.fit_twice_a_model_that_cannot_be_saved)
    assert [m.step for m in client.get_metric_history(result.run_id, "loss")] == [0, 1, 2]
    assert all(rate > 0 for rate in result.history["examples_per_second"])
    assert result.model_uri is None
    (notice,) = result.notices
    assert "could not be logged" in notice
    assert "weights.npz" in notice
    kept = np.load(client.download_artifacts(result.run_id, "model/weights.npz"))
    assert [kept[name].shape for name in kept.files] == [(8, 1), (1,)]


def test_the_result_reads_well(spark: Any, tracking: Tracking) -> None:
    """The result names topology, workers, metrics, run and model, as text and as escaped HTML."""
    result = Runner(num_slots=2, tracking=tracking).run(lambda: "<b>bold</b>")
    text, html = repr(result), result._repr_html_()
    for part in ("2 workers on 1 host", "worker 1", str(result.run_id), "seconds"):
        assert part in text
        assert part in html
    assert "&lt;b&gt;bold" in html
    assert "<b>bold" not in html


def test_a_lost_port_is_replaced(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that somebody else has when TensorFlow wants it costs a new start of all workers, not the run."""
    from dbx_tf.worker import task

    thief = socket.create_server(("", 0))
    original, calls = task.held_port, []

    def stolen_once(ip: str) -> Any:
        calls.append(1)
        return _port(thief.getsockname()[1]) if len(calls) == 1 else original(ip)

    monkeypatch.setattr(task, "held_port", stolen_once)
    with thief:
        result = Runner(num_slots=2, local_mode=True, tracking=tracking).run(train_fns.fit_and_return_weights)
    assert len(calls) == 4
    assert len(result.history["loss"]) == 2
    assert "lost its port" in result.notices[0]
    assert result.num_restarts == 1


def _port(number: int) -> Any:
    import contextlib

    return contextlib.nullcontext(number)


def test_tracking_can_be_off(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tracking a run trains all the same and writes nothing."""
    monkeypatch.chdir(tmp_path)
    result = Runner(num_slots=2, tracking=Tracking(enabled=False)).run(train_fns.fit_and_return_weights)
    assert len(result.history["loss"]) == 2
    assert (result.run_id, result.model_uri) == (None, None)
    assert list(tmp_path.iterdir()) == []
