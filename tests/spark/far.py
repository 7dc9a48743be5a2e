"""Trainings over Spark Connect; run by test_connect.py where Spark's workers can't reach the client.

Usage: far.py <address of Spark Connect> <MLflow tracking URI> <file for the answers>
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import train_fns  # beside this file

from dbx_tf import DbxTfError, Runner, Tracking, WorkerFailedError


def log_and_fit() -> Any:
    """User code that logs by itself and trains."""
    train_fns.log_with_mlflow()
    return train_fns.fit_and_return_weights()


def take(data: Any) -> int:
    """Large arguments."""
    return int(data.nbytes)


def main(address: str, uri: str, out: str) -> None:
    """Train, fail, and ship too much."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(address).getOrCreate()
    runner = Runner(num_slots=2, tracking=Tracking(tracking_uri=uri))
    result = runner.run(log_and_fit)
    answers: dict[str, Any] = {
        "run_id": result.run_id,
        "loss": result.history["loss"],
        "weights": [weight.tolist() for weight in result.value["weights"]],
        "notices": result.notices,
        "model_uri": result.model_uri,
        "topology": str(result.topology),
    }
    try:
        runner.run(train_fns.fail_on, worker_index=1, how="raise")
    except WorkerFailedError as error:
        answers["failure"] = [error.worker_index, error.cause_type, error.log_tail, error.run_id]
    try:
        runner.run(take, data=np.zeros(70 << 20, np.uint8))
    except DbxTfError as error:
        answers["too_large"] = f"{type(error).__name__}: {error}"
    spark.stop()
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
