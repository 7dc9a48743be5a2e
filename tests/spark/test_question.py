"""The question that this package answers, on two set-ups of Spark."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import HERE


def spark_home(folder: Path) -> Path:
    """A SPARK_HOME of links: local-cluster writes into it, which must not be the installed package."""
    import pyspark

    home = folder / "spark_home"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


def run_script(script: str, *args: str, folder: Path, timeout: float = 280) -> Any:
    """Run a script that starts a Spark of its own, and return the answers it writes."""
    out = folder / "answers.json"
    full = {**os.environ, "SPARK_HOME": str(spark_home(folder)), "SPARK_LOCAL_IP": "127.0.0.1"}
    full.pop("MLFLOW_TRACKING_URI", None)  # where other tests have set it
    command = [sys.executable, str(HERE / script), *args, str(out)]
    done = subprocess.run(command, cwd=folder, env=full, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return {**json.loads(out.read_text()), "output": done.stdout}


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_all_three_kinds_of_code_train_on_both_workers(master: str, store: str, tmp_path: Path) -> None:
    """Plain Keras, the standard advice and the mistake: two workers, one model, and Spark as it was before."""
    answers = run_script("question.py", master, store, folder=tmp_path)
    for kind in ("plain", "multi_worker", "mirrored"):
        answer = answers[kind]
        assert (answer["workers"], answer["replicas"]) == (2, 2), kind
        assert len(set(answer["pids"])) == 2, kind
        assert len(set(answer["executors"])) == (2 if "cluster" in master else 1)
        assert len(answer["accuracy"]) == 5
        assert answer["accuracy"][-1] > 0.93, kind  # one process: 0.96 to 0.98
        assert answer["model_uri"]
        was_told = any("MirroredStrategy, which never leaves its server" in notice for notice in answer["notices"])
        assert was_told == (kind == "mirrored")
    assert any("on one host" in n and "same machine" in n for n in answers["plain"]["notices"]) == ("cluster" in master)
    assert answers["leaked"] == [{}, {}]
    assert "Number of devices: 2" in answers["output"]
