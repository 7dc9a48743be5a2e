"""Each notebook runs from top to bottom on a local Spark, with a double of Databricks' dbutils."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

# What Databricks puts into a notebook: a Spark session with as many slots as the cluster has, and dbutils, of which
# this is a double. It runs in a process of its own, since a notebook has its own Python too.
HARNESS = """
import sys, types
from pyspark.sql import SparkSession

class Widgets:
    def __init__(self): self.values = {}
    def text(self, name, default): self.values.setdefault(name, default)
    def get(self, name): return self.values[name]

dbutils = types.SimpleNamespace(
    widgets=Widgets(), library=types.SimpleNamespace(restartPython=lambda: None)
)
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.sql.warehouse.dir", "warehouse").getOrCreate()
scope = {"dbutils": dbutils, "spark": spark, "__name__": "__main__"}
path = sys.argv[1]
exec(compile(open(path).read(), path, "exec"), scope)
print("RESULT", scope["result"])
spark.stop()
"""


def test_notebooks_are_in_databricks_source_format() -> None:
    for path in sorted(NOTEBOOKS.glob("*.py")):
        lines = path.read_text().splitlines()
        assert lines[0] == "# Databricks notebook source", path
        assert "# COMMAND ----------" in lines, path
        assert any(line.startswith("# MAGIC %pip install") for line in lines), path


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "printed", "result"),
    [
        ("01_two_servers", "Number of devices: 2", r"2 workers on 1 host, 2 replicas in sync"),
        ("04_load_register_score", "2 workers on 1 host, 2 replicas in sync", r"accuracy=(1\.0|0\.9)"),
    ],
)
def test_a_notebook_runs(name: str, printed: str, result: str, tmp_path: Path) -> None:
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    command = [sys.executable, "-c", HARNESS, str(NOTEBOOKS / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=180, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert printed in done.stdout
    assert re.search(result, done.stdout.split("RESULT")[1])
