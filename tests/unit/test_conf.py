"""The bundle in conf/ is one that Databricks takes, and what it names is there."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from databricks.bundles.jobs import Job

from dbx_tf import job

CONF = Path(__file__).parents[2] / "conf"
RESOURCES = sorted((CONF / "resources").glob("*.yml"))


def jobs() -> dict[str, tuple[Path, dict[str, Any]]]:
    """All jobs by name, with the file that each is in."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in RESOURCES:
        found |= {name: (path, made) for name, made in yaml.safe_load(path.read_text())["resources"]["jobs"].items()}
    return found


@pytest.mark.parametrize("name", jobs())
def test_databricks_takes_the_job(name: str) -> None:
    Job.from_dict(jobs()[name][1])


@pytest.mark.parametrize("name", jobs())
def test_a_cluster_is_of_fixed_size_dedicated_and_has_a_worker_on_each_server(name: str) -> None:
    _, made = jobs()[name]
    for cluster in (entry["new_cluster"] for entry in made["job_clusters"]):
        assert "autoscale" not in cluster
        assert cluster["num_workers"] == "${var.num_servers}"
        assert cluster["data_security_mode"] == "DATA_SECURITY_MODE_DEDICATED"
        assert cluster["aws_attributes"]["availability"] == "ON_DEMAND"
        conf = cluster["spark_conf"]
        assert ("spark.task.cpus" in conf) != ("spark.task.resource.gpu.amount" in conf)


@pytest.mark.parametrize("name", jobs())
def test_a_task_ends_in_time_and_names_what_is_there(name: str) -> None:
    path, made = jobs()[name]
    clusters = {entry["job_cluster_key"] for entry in made["job_clusters"]}
    for task in made["tasks"]:
        assert task["timeout_seconds"] > 0
        assert task["job_cluster_key"] in clusters
        if "python_wheel_task" in task:
            wheel = task["python_wheel_task"]
            scripts = importlib.metadata.entry_points(group="console_scripts", name=wheel["entry_point"])
            assert [script.value for script in scripts] == ["dbx_tf.cli:main"]
        elif "notebook_task" in task:
            notebook = (path.parent / task["notebook_task"]["notebook_path"]).resolve()
            assert notebook.read_text().startswith("# Databricks notebook source")
        else:
            script = (path.parent / task["spark_python_task"]["python_file"]).resolve()
            compile(script.read_text(), script, "exec")


def test_every_variable_is_declared_and_used() -> None:
    bundle = yaml.safe_load((CONF / "databricks.yml").read_text())
    text = "".join(path.read_text() for path in RESOURCES) + str(bundle["variables"])
    used = {part.split("}")[0] for part in text.split("${var.")[1:]}
    assert used == set(bundle["variables"])
    assert set(bundle["targets"]) == {"dev", "prod"}
    assert [path for pattern in bundle["include"] for path in sorted(CONF.glob(pattern))] == RESOURCES


def test_the_example_of_a_job_is_one() -> None:
    made = job.load_job(CONF / "jobs" / "train.yml")
    assert made.train_fn is not None
    assert made.make_runner().num_slots == 2
    assert "epochs" in made.params
    assert callable(job.find_train_fn(made.train_fn))
