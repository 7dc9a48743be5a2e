"""GPU arithmetic on a Spark whose GPUs are made up by a discovery script; run by test_gpus.py.

Usage: gpus.py <Spark master> <GPUs per executor> <GPUs per task> <slots> <file for the answers>
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from dbx_tf import DbxTfError, Runner, Tracking


def which_gpus() -> Any:
    """The devices each worker was given; TensorFlow finds none of them on this machine."""
    import os

    from dbx_tf import get_context

    print(f"worker {get_context().worker_index} has {os.environ['CUDA_VISIBLE_DEVICES']}")
    return os.environ["CUDA_VISIBLE_DEVICES"]


def main(master: str, per_executor: str, per_task: str, num_slots: str, out: str) -> None:
    """Run twice in one session, since the second run is where MirroredStrategyRunner breaks."""
    from pyspark.sql import SparkSession

    script = Path(tempfile.mkdtemp(), "discover.sh")
    addresses = ", ".join(f'"{index}"' for index in reversed(range(int(per_executor))))
    script.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
    script.chmod(0o755)
    settings = {
        "spark.ui.enabled": "false",
        "spark.worker.resource.gpu.amount": per_executor,
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": per_executor,
        "spark.executor.resource.gpu.discoveryScript": str(script),
        "spark.task.resource.gpu.amount": per_task,
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    answers: dict[str, Any] = {"runs": [], "error": ""}
    runner = Runner(num_slots=int(num_slots), use_gpu=True, tracking=Tracking(enabled=False))
    try:
        for _ in range(2):
            plan = runner.plan()
            result = runner.run(which_gpus)
            run = {"value": result.value, "workers": result.topology.num_workers, "each": plan.gpus_per_worker}
            answers["runs"].append(run)
    except DbxTfError as error:
        answers["error"] = f"{type(error).__name__}: {error}"
    spark.stop()
    script.unlink()
    script.parent.rmdir()
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
