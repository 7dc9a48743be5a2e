"""`dbx-tf run` as a shell or a scheduled job starts it: real processes, real training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = """
import time
from helper_of_train import scale

def train_fn(epochs: int = 1, rate: float = 0.1, fail: bool = False, sleep: float = 0.0):
    import keras, numpy as np
    x = np.random.RandomState(0).rand(64, 4).astype("float32") * scale
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    history = model.fit(x, x.sum(axis=1), epochs=epochs, batch_size=16, verbose=0)
    print("trained", len(history.epoch), "epochs", flush=True)
    time.sleep(sleep)
    if fail:
        raise ValueError("this training fails")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder as in a workspace: a train_fn, its helper, and a configuration."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper_of_train.py").write_text("scale = 2.0")
    (tmp_path / "job.yml").write_text("train_fn: train.py:train_fn\nrunner: {num_slots: 2, local_mode: true}\n")
    return tmp_path


def start(project: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the command in the project's folder."""
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{project}/mlflow.db"}
    command = [str(Path(sys.executable).with_name("dbx-tf")), "run", "--config", "job.yml", *arguments]
    return subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(120)
def test_a_job_trains_and_logs(project: Path) -> None:
    process = start(project, "--param", "epochs=3", "--run-name", "nightly", "--experiment", "jobs")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err[-3000:]
    assert "trained 3 epochs" in out + err
    assert "2 workers on 1 host, 2 replicas in sync" in out

    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{project}/mlflow.db")
    experiment = client.get_experiment_by_name("jobs")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "nightly"
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "3"


@pytest.mark.timeout(120)
def test_a_training_that_fails_exits_with_1(project: Path) -> None:
    process = start(project, "--param", "fail=true")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "WorkerFailedError: ValueError: this training fails" in err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_cancelled_exits_with_3(project: Path, number: signal.Signals) -> None:
    process = start(project, "--param", "sleep=60")
    assert process.stdout is not None
    deadline = time.monotonic() + 60
    for line in process.stdout:
        if "trained" in line or time.monotonic() > deadline:
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 3, err[-3000:]
