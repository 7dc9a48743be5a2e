"""A training on a Spark cluster that is running already; run by test_two_hosts.py.

Usage: hosts.py <Spark master> <address of the driver> <MLflow tracking URI> <file for the answers>
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import train_fns  # beside this file

from dbx_tf import Runner, Tracking


def main(master: str, address: str, uri: str, out: str) -> None:
    """Train on both hosts and write down where it happened."""
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.executor.memory": "1g",
    }
    spark = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    runner = Runner(num_slots=2, require_hosts="all", tracking=Tracking(tracking_uri=uri))
    asked = runner.plan(train_fns.fit_and_return_weights, probe=True)
    result = runner.run(train_fns.fit_and_return_weights)
    answers = {
        "topology": str(result.topology),
        "hosts": sorted(worker.host for worker in result.topology.workers),
        "addresses": sorted(worker.address.rpartition(":")[0] for worker in result.topology.workers),
        "executors": sorted(worker.executor for worker in result.topology.workers),
        "notices": result.notices,
        "plan": str(asked),
        "plan_hosts": sorted(finding.host for finding in asked.findings),
        "plan_of_one_slot": str(replace(runner, num_slots=1, require_hosts=None).plan()),
        "plan_of_local_mode": str(replace(runner, local_mode=True, require_hosts=None).plan()),
        "loss": result.history["loss"],
        "model_uri": result.model_uri,
    }
    spark.stop()
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
