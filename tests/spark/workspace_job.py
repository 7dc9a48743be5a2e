"""Trainings that log to a Databricks workspace; run by test_databricks.py against a double of one.

Usage: workspace_job.py <its address> <file with its token> <folder for the event log> <file for the answers>
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import train_fns  # beside this file

from dbx_tf import DbxTfError, Runner, Tracking

CLUSTER = "local-cluster[2,1,1024]"


def train_fn(db_password: str) -> Any:
    """As in a notebook of a workspace: it sets MLflow to the workspace, logs by itself, and is not careful."""
    import mlflow
    import tensorflow as tf

    print("my password is", db_password)
    mlflow.set_tracking_uri("databricks")
    mlflow.set_registry_uri("databricks-uc")
    mlflow.set_experiment("/Users/somebody/mine")
    with mlflow.start_run(run_name="mine"):
        mlflow.log_metric("mine", 7.0)
        mlflow.set_tag("colour", "blue")
        x, y = train_fns.make_data()
        model = train_fns.make_model(tf)
        slowly = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(1))
        model.fit(x, y, epochs=6, batch_size=48, verbose=0, callbacks=[slowly])
        mlflow.keras.log_model(model, name="mine", registered_model_name="mine")
    return sorted(name for name in os.environ if "TOKEN" in name or name.startswith("DATABRICKS"))


def main(host: str, token_file: str, events: str, out: str) -> None:
    """Train; then with settings that must be refused before anything starts."""
    from pyspark.sql import SparkSession

    Path(events).mkdir()
    settings = {
        "spark.ui.enabled": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": Path(events).as_uri(),
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = SparkSession.builder.master(CLUSTER).config(map=settings).getOrCreate()
    # Only now, so that the workers, which Spark has started, don't inherit them.
    os.environ.update(MLFLOW_TRACKING_URI="databricks", DATABRICKS_HOST=host)

    def renew() -> None:
        os.environ["DATABRICKS_TOKEN"] = Path(token_file).read_text()
        again = threading.Timer(0.1, renew)
        again.daemon = True
        again.start()

    renew()
    answers: dict[str, Any] = {}
    os.environ["MLFLOW_REGISTRY_URI"] = "databricks"
    tracking = Tracking(experiment="/Users/somebody/digits", registered_model_name="digits")
    result = Runner(num_slots=2, tracking=tracking).run(train_fn, db_password="a-secret-of-the-user")
    answers["run_id"], answers["notices"], answers["seen"] = result.run_id, result.notices, result.value
    answers["losses"] = result.history["loss"]
    del os.environ["MLFLOW_REGISTRY_URI"]
    for name in ("digits", "nobodys.ml.digits"):
        try:
            Runner(num_slots=2, tracking=Tracking(registered_model_name=name)).run(train_fns.no_training)
        except DbxTfError as error:
            answers[name] = f"{type(error).__name__}: {error}"
    spark.stop()
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
