"""What a run of dbx_tf costs over the same two processes started by hand.

Both sides train the same tf_keras model on the same data in two processes on this machine; by hand, with TF_CONFIG, no
launcher, no MLflow and no model saved. Runs alternate, so that other load on the machine hits both.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from dbx_tf import Runner, Tracking

ROUNDS = 5
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}  # tf_keras trains by itself on several workers; Keras 3 does not
BY_HAND = """
import tensorflow as tf
from tests.benchmarks.bench_overhead import train_fn
with tf.distribute.MultiWorkerMirroredStrategy().scope():
    train_fn()
"""


def train_fn() -> None:
    """A small network, so that what is measured is the way to and from training."""
    import numpy as np
    import tensorflow as tf

    x = np.random.RandomState(0).rand(512, 8).astype("float32")
    model = tf.keras.Sequential(
        [tf.keras.Input((8,)), tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(1)]
    )
    model.compile(optimizer="sgd", loss="mse")
    model.fit(x, x.sum(axis=1), epochs=2, batch_size=64, verbose=0)


def by_hand() -> float:
    """Seconds of two processes with TF_CONFIG."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    workers = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    started = time.monotonic()
    processes = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        env = {**os.environ, **LEGACY, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1"}
        processes.append(subprocess.Popen([sys.executable, "-c", BY_HAND], env=env, stderr=subprocess.DEVNULL))
    codes = [process.wait(300) for process in processes]
    if any(codes):
        raise RuntimeError(f"training by hand failed with exit codes {codes}")
    return time.monotonic() - started


def by_runner(tracking: Tracking) -> Callable[[], float]:
    """Seconds of Runner.run with two workers in local mode."""
    runner = Runner(num_slots=2, local_mode=True, env=LEGACY, tracking=tracking)
    return lambda: runner.run(train_fn).seconds


def section() -> str:
    """The measurement as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        database = Tracking(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        sides = {
            "two processes by hand": by_hand,
            "Runner, tracking off": by_runner(Tracking(enabled=False)),
            "Runner, metrics and model to MLflow (sqlite)": by_runner(database),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(ROUNDS + 1):
            for name, side in sides.items():
                taken = side()
                if number:  # the first round fills caches
                    seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians["two processes by hand"]
    rows = "".join(f"| {name} | {median:.1f} | {median / base:.2f} |\n" for name, median in medians.items())
    return (
        "## A run\n\nFrom the call to the result, for a training that takes no time by itself: two workers of one "
        f"machine, tf_keras, 2 epochs of 8 steps; medians of {ROUNDS} alternating runs.\n\n"
        f"| | seconds | ratio |\n|---|---|---|\n{rows}"
    )
