"""GPU arithmetic on a Spark whose GPUs are made up by a discovery script; run by test_gpus.py.

Usage: gpus.py <Spark master, or address of Spark Connect> <settings as JSON> <slots> <file for the answers>
"""

import json
import sys
from pathlib import Path
from typing import Any

from dbx_tf import DbxTfError, Runner, Tracking


def which_gpus() -> Any:
    """The devices each worker was given; TensorFlow finds none of them on this machine."""
    import os

    from dbx_tf import get_context

    print(f"worker {get_context().worker_index} has {os.environ['CUDA_VISIBLE_DEVICES']}")
    return os.environ["CUDA_VISIBLE_DEVICES"]


def main(master: str, settings: str, num_slots: str, out: str) -> None:
    """Run twice in one session, since the second run is where MirroredStrategyRunner breaks."""
    from pyspark.sql import SparkSession

    if master.startswith("sc://"):
        spark = SparkSession.builder.remote(master).getOrCreate()
    else:
        spark = SparkSession.builder.master(master).config(map=json.loads(settings)).getOrCreate()
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
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
