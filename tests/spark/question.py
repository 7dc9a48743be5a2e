"""The question's program, in the three ways people have it; run by test_question.py on a Spark of its own.

Usage: question.py <Spark master> <MLflow tracking URI> <file for the answers>
"""

import json
import os
import sys
from typing import Any

from dbx_tf import Runner, Tracking
from dbx_tf.demo import load_digits


def build_and_fit(tf: Any) -> Any:
    """The model of the question."""
    x_train, y_train = load_digits()
    model = tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=tf.keras.optimizers.Adam(), metrics=["accuracy"])
    return model.fit(x_train, y_train, epochs=5, batch_size=64, verbose=2).history["accuracy"]


def plain() -> Any:
    """No strategy at all."""
    import tensorflow as tf

    return build_and_fit(tf)


def multi_worker() -> Any:
    """The standard advice."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        return build_and_fit(tf)


def mirrored() -> Any:
    """The mistake that the question began with."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    with strategy.scope():
        return build_and_fit(tf)


def main(master: str, uri: str, out: str) -> None:
    """Train in all three ways in one Spark session, then look what an ordinary Spark job sees."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    spark = builder.getOrCreate()
    answers: dict[str, Any] = {}
    for train_fn in (plain, multi_worker, mirrored):
        result = Runner(num_slots=2, local_mode=False, tracking=Tracking(tracking_uri=uri)).run(train_fn)
        answers[train_fn.__name__] = {
            "accuracy": result.value,
            "workers": result.topology.num_workers,
            "replicas": result.topology.num_replicas,
            "pids": [worker.pid for worker in result.topology.workers],
            "executors": [worker.executor for worker in result.topology.workers],
            "notices": result.notices,
            "model_uri": result.model_uri,
        }
    names = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_GRPC_REUSE_PORT", "MLFLOW_TRACKING_URI")
    seen = spark.sparkContext.parallelize(range(2), 2).map(
        lambda _: {n: os.environ[n] for n in names if n in os.environ}
    )
    answers["leaked"] = seen.collect()
    spark.stop()
    with open(out, "w") as file:  # noqa: PTH123  # as short as users write it
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
