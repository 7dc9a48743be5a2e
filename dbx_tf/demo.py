"""The demo: a convolutional network on handwritten digits, on two real workers of a local Spark.

Runs on: driver (`run_demo`) and workers (`train_fn`, which is ordinary Keras code).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from dbx_tf.driver.runner import Runner

_JAVA_HELP = (
    "Spark needs Java 17 or 21, and there is no java on the PATH; install it (Debian and Ubuntu: "
    "apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17) and set JAVA_HOME if it is not found"
)


def load_digits() -> tuple[Any, Any]:
    """1,797 handwritten digits of the UCI repository, which scikit-learn brings along.

    Returns:
        Images, float32 [example, 28, 28, 1] from 0 to 1, and labels, int64 [example].
    """
    import numpy as np
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype("float32") / 16.0
    enlarged = np.kron(images, np.ones((1, 3, 3), dtype="float32"))
    return np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))[..., None], labels


def train_fn(epochs: int = 5) -> float:
    """Train and return the accuracy on digits that were held back. Nothing in here knows of Spark or of workers."""
    import keras

    images, labels = load_digits()
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    held_back = (images[1500:], labels[1500:])
    model.fit(images[:1500], labels[:1500], epochs=epochs, batch_size=64, validation_data=held_back, verbose=2)
    return float(model.evaluate(*held_back, verbose=0)[1])


def run_demo(num_slots: int, epochs: int) -> None:
    """Run the demo and say what came of it."""
    if shutil.which("java") is None and not Path(os.environ.get("JAVA_HOME", ""), "bin", "java").is_file():
        raise click.ClickException(_JAVA_HELP)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{num_slots}]").appName("dbx_tf demo")
    spark = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        runner = Runner(num_slots=num_slots)
        plan = runner.plan(train_fn, epochs=epochs)
        click.echo(plan)
        result = runner.run(train_fn, epochs=epochs)
    finally:
        spark.stop()
    click.echo(result)
    click.echo(f"\n{result.topology}; accuracy on digits it has not seen: {result.value:.3f}")
    click.echo(f"\nTo see the run:    {sys.executable} -m mlflow ui --backend-store-uri {plan.tracking_uri}")
    click.echo(f"To use the model:  mlflow.pyfunc.load_model({result.model_uri!r})")
