"""What a caller sees when training fails: the first cause, soon, with nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbx_tf import ClusterError, ConfigError, DbxTfError, Runner, Tracking, TrackingError, WorkerFailedError

from . import train_fns
from .conftest import CLASSIC, CONNECT_MODE, HERE, connect_server, training_processes

MUCH_LONGER_THAN_IT_TAKES = 90.0
REFUSED_WITHIN = 2.0


@pytest.mark.parametrize(
    ("spark", "local_mode", "worker_index", "how", "cause_type", "text"),
    [
        ("classic", False, 0, "raise", "ValueError", "user bug"),
        ("classic", False, 1, "exit", "ProcessExited", "exit code 3"),
        ("connect", False, 1, "raise", "ValueError", "user bug"),
        ("connect", False, 0, "SIGKILL", "ProcessKilled", "signal 9"),
        ("classic", True, 1, "raise", "ValueError", "user bug"),
        ("classic", True, 0, "SIGSEGV", "ProcessKilled", "SIGSEGV"),
    ],
    indirect=["spark"],
)
def test_a_failing_worker_is_named(
    spark: Any,
    tracking: Tracking,
    client: Any,
    worker_index: int,
    how: str,
    cause_type: str,
    text: str,
    local_mode: bool,
) -> None:
    """Whichever worker fails, and however: it is named with its cause, and the MLflow run ends as FAILED.

    test_faults.py has the other ways to fail, and other clusters.
    """
    started = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        Runner(num_slots=2, local_mode=local_mode, tracking=tracking).run(
            train_fns.fail_on, worker_index=worker_index, how=how
        )
    assert time.monotonic() - started < MUCH_LONGER_THAN_IT_TAKES
    error = caught.value
    assert (error.worker_index, error.cause_type) == (worker_index, cause_type)
    assert text in error.cause_message
    assert error.host
    assert any("about to fail" in line for line in error.log_tail)
    assert "Py4J" not in str(error)
    assert "org.apache.spark" not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__
    if how == "raise":
        assert "in on_epoch_begin" in error.traceback
        assert error.traceback in str(error) + "\n"
    run = client.get_run(error.run_id)
    assert run.info.status == "FAILED"
    assert text in run.data.tags["dbx_tf.error"]
    assert {a.path for a in client.list_artifacts(error.run_id, "logs")} == {"logs/worker_0.log", "logs/worker_1.log"}


def test_the_next_run_works(spark: Any, tracking: Tracking) -> None:
    """After a failure, the same Spark session trains again at once."""
    runner = Runner(num_slots=2, tracking=tracking)
    with pytest.raises(WorkerFailedError):
        runner.run(train_fns.fail_on, worker_index=1, how="raise")
    assert len(runner.run(train_fns.fit_and_return_weights).history["loss"]) == 2


@CLASSIC
def test_slots_that_others_hold_are_not_waited_for_without_end(spark: Any, tracking: Tracking, tmp_path: Path) -> None:
    """Spark starts no barrier task while another job holds the slots: the error says whom it waits for."""
    let_go = tmp_path / "let_go"

    def hold(index: int) -> None:
        (tmp_path / f"holding_{index}").touch()
        while not let_go.exists():
            time.sleep(0.1)

    holder = threading.Thread(target=spark.sparkContext.parallelize(range(2), 2).foreach, args=(hold,))
    holder.start()
    try:
        while len(list(tmp_path.glob("holding_*"))) < 2:
            time.sleep(0.1)
        runner = Runner(num_slots=2, tracking=tracking, start_timeout_seconds=5)
        with pytest.raises(ClusterError, match=r"start_timeout_seconds=5; Spark never started the task of worker 0, 1"):
            runner.run(train_fns.no_training)
    finally:
        let_go.touch()
        holder.join(60)


def test_a_run_ends_in_time(tracking: Tracking, client: Any) -> None:
    """After timeout_seconds it is over, with a stack of each worker, and the MLflow run has failed."""
    runner = Runner(num_slots=2, local_mode=True, tracking=tracking, timeout_seconds=15)
    with pytest.raises(WorkerFailedError, match=r"ended after timeout_seconds=15") as caught:
        runner.run(train_fns.train_for_ever)
    assert caught.value.cause_type == "Timeout"
    assert caught.value.traceback.count("in train_for_ever") == 2
    assert client.get_run(caught.value.run_id).info.status == "FAILED"


def test_an_unpicklable_value_costs_nothing_but_itself(spark: Any, tracking: Tracking, client: Any) -> None:
    """A generator can't come back: the run is complete, with its model, and asking for the value says why."""
    result = Runner(num_slots=2, tracking=tracking).run(train_fns.return_a_generator)
    assert str(result.model_uri).startswith("models:/m-")
    assert len(result.history["loss"]) == 1
    assert "generator that can't be pickled" in result.notices[0]
    assert client.get_run(result.run_id).info.status == "FINISHED"
    with pytest.raises(DbxTfError, match=r"returned a generator.*model_uri=models:/m-"):
        _ = result.value


def test_a_missing_module_on_the_workers_is_explained(spark: Any, tracking: Tracking, tmp_path: Path) -> None:
    """An import inside train_fn of what workers don't have says how to bring it there."""

    def train_fn() -> None:
        import importlib

        importlib.import_module("a_module_that_nobody_has")

    with pytest.raises(
        WorkerFailedError, match=r"a_module_that_nobody_has.*import it at the top of the file"
    ) as caught:
        Runner(num_slots=2, tracking=tracking).run(train_fn)
    assert caught.value.cause_type == "ModuleNotFoundError"


@pytest.mark.parametrize(
    ("number", "way"), [(signal.SIGINT, "classic"), (signal.SIGINT, "connect"), (signal.SIGTERM, "local")]
)
def test_ctrl_c_ends_everything(
    tracking: Tracking, client: Any, tmp_path: Path, number: signal.Signals, way: str
) -> None:
    """SIGINT and SIGTERM at the driver end the workers within seconds and the MLflow run as KILLED."""
    name, env = f"killed by {number.name}, {way}", dict(os.environ)
    session = "builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()"
    with contextlib.ExitStack() as stack:
        if way == "connect":
            address = stack.enter_context(connect_server(tmp_path, "local[2]"))
            session, env[CONNECT_MODE] = f"builder.remote({address!r}).getOrCreate()", "1"
        script = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import train_fns
from dbx_tf import Runner, Tracking
if {way != "local"}:
    from pyspark.sql import SparkSession
    SparkSession.{session}
tracking = Tracking(tracking_uri={tracking.tracking_uri!r}, run_name={name!r})
Runner(num_slots=2, local_mode={way == "local"}, tracking=tracking).run(train_fns.train_for_ever)
"""
        command = [sys.executable, "-c", script]
        driver = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        for line in driver.stdout:
            if "replicas in sync" in line:
                break
        driver.send_signal(number)
        driver.communicate(timeout=60)
        assert driver.returncode in (-number, 128 + number, 1)
        assert training_processes() == []  # while the server, if there is one, goes on
        (run,) = client.search_runs(["0"], f"attributes.run_name = '{name}'")
        assert run.info.status == "KILLED"


@CLASSIC
@pytest.mark.parametrize("kind", ["session", "frame", "dataset", "strategy", "model", "optimizer", "variable", "layer"])
def test_what_would_arrive_broken_is_refused(spark: Any, tracking: Tracking, kind: str) -> None:
    """Spark, datasets, strategies, models and variables in a closure are refused by name, in under two seconds."""
    import keras
    import tensorflow as tf

    make: dict[str, Callable[[], Any]] = {
        "session": lambda: spark,
        "frame": lambda: spark.range(3),
        "dataset": lambda: tf.data.Dataset.range(3),
        "strategy": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
        "model": lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
        "optimizer": keras.optimizers.Adam,
        "variable": lambda: tf.Variable(1.0),
        "layer": lambda: keras.layers.Dense(1),
    }
    captured = make[kind]()
    started = time.monotonic()
    with pytest.raises(ConfigError, match="the variable captured that train_fn uses"):
        Runner(num_slots=2, tracking=tracking).run(_capture(captured))
    assert time.monotonic() - started < REFUSED_WITHIN


def _capture(captured: Any) -> Callable[[], Any]:
    def train_fn() -> Any:
        return captured

    return train_fn


def test_more_slots_than_the_cluster_has_are_refused(spark: Any, tracking: Tracking) -> None:
    """Too many slots are told in under two seconds, with how many there are."""
    started = time.monotonic()
    with pytest.raises(ClusterError, match=r"num_slots=4 needs 4 tasks.*at most 3.*num_slots up to 3"):
        Runner(num_slots=4, tracking=tracking).run(train_fns.no_training)
    assert time.monotonic() - started < REFUSED_WITHIN


def test_gpus_on_a_cluster_without_are_refused(spark: Any, tracking: Tracking) -> None:
    """use_gpu=True where Spark schedules no GPUs names the setting; without it the run uses CPUs."""
    with pytest.raises(ClusterError, match=r"spark\.task\.resource\.gpu\.amount is not set.*use_gpu=False"):
        Runner(num_slots=2, use_gpu=True, tracking=tracking).run(train_fns.no_training)
    assert Runner(num_slots=2, tracking=tracking).plan().gpus_per_worker == 0


@pytest.mark.parametrize("uri", ["file:///old/mlruns", "/old/mlruns", "./mlruns"])
def test_the_file_store_is_refused(uri: str) -> None:
    """MLflow's old file store is told before anything starts, with the line that works."""
    with pytest.raises(ConfigError, match=r"file store.*sqlite:///"):
        Runner(num_slots=1, local_mode=True, tracking=Tracking(tracking_uri=uri)).run(train_fns.no_training)


def test_a_tracking_server_that_is_not_there_is_told() -> None:
    """An address where nobody listens is an error before training, within a minute, without the password in it."""
    started = time.monotonic()
    uri = "http://me:secret@127.0.0.1:9"
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1:9 does not take a run") as caught:
        Runner(num_slots=1, local_mode=True, tracking=Tracking(tracking_uri=uri)).run(train_fns.no_training)
    assert "secret" not in str(caught.value)
    assert time.monotonic() - started < MUCH_LONGER_THAN_IT_TAKES
