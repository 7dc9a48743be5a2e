"""A run that logs to a Databricks workspace, against a double of one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbx_tf import Runner, Tracking, TrackingError

from . import train_fns
from .conftest import run_script
from .workspace import Request, Workspace, workspace

OLD, NEW = "dapi-the-first-token", "dapi-the-second-token"


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace of its own for each test."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    with workspace(folder, OLD) as double:
        yield double


def test_the_drivers_token_is_enough_and_stays_there(double: Workspace, tmp_path: Path) -> None:
    """Workers have no credentials, a renewed token is survived, and no secret is to be found."""
    job = tmp_path / "job"
    job.mkdir()
    token_file = tmp_path / "token"
    token_file.write_text(OLD)

    def renew(request: Request) -> None:
        if '"key": "loss"' in request.body:
            double.token = NEW
        if request.status == 403:  # a while in which the old one is used though it is no longer taken
            token_file.write_text(NEW)

    double.on_request = renew
    answers = run_script("workspace_job.py", double.host, str(token_file), str(tmp_path / "events"), folder=job)
    assert answers["seen"] == []
    asked = [request for request in double.requests if not request.path.startswith("/.well-known")]
    assert {request.authorization for request in asked} == {f"Bearer {OLD}", f"Bearer {NEW}"}
    refused = [request for request in asked if request.status == 403]
    assert refused
    assert {request.authorization for request in refused} == {f"Bearer {OLD}"}
    runs = {found for request in asked for found in re.findall(r'"run_id": "(\w+)"', request.body)}
    assert runs == {answers["run_id"]}

    from mlflow import MlflowClient

    client = MlflowClient(double.upstream)
    run = client.get_run(answers["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["mine"] == 7.0
    assert run.data.tags["colour"] == "blue"
    assert run.data.params["db_password"] == "***"
    losses = client.get_metric_history(answers["run_id"], "loss")
    assert [metric.step for metric in losses] == list(range(6))
    assert [metric.value for metric in losses] == pytest.approx(answers["losses"])
    for name in ("digits", "mine"):
        assert [version.version for version in client.search_model_versions(f"name='{name}'")] == ["1"]

    assert answers["digits"].startswith("ConfigError: registered_model_name='digits'; Unity Catalog takes")
    assert answers["nobodys.ml.digits"].startswith("TrackingError: the model can't be registered as nobodys.ml.digits")
    assert "No such catalog" in answers["nobodys.ml.digits"]

    (tmp_path / "requests.json").write_text(json.dumps([request.body for request in double.requests]))
    token_file.unlink()
    searched = [file for file in tmp_path.rglob("*") if file.is_file() and "spark_home" not in file.parts]
    workers = [file for file in (job / "spark_home" / "work").rglob("std*") if file.stat().st_size]
    assert len(workers) >= 2
    assert any("events" in file.parts for file in searched)
    for secret in (OLD, NEW, "a-secret-of-the-user"):
        # What train_fn prints by itself is in its own server's log as it is: nobody there knows what is secret.
        files = searched if secret.startswith("a-") else searched + workers
        assert [str(file) for file in files if secret.encode() in file.read_bytes()] == []
        assert secret not in json.dumps(answers)


def test_a_wrong_token_is_refused_before_training(double: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts, nothing is made, and the token is not in the error."""
    for name, value in (("HOST", double.host), ("TOKEN", "dapi-a-wrong-token")):
        monkeypatch.setenv(f"DATABRICKS_{name}", value)
    tracking = Tracking(tracking_uri="databricks", experiment="/Users/somebody/digits")
    with pytest.raises(TrackingError, match=r"MLflow at databricks does not take a run") as caught:
        Runner(num_slots=2, local_mode=True, tracking=tracking).run(train_fns.no_training)
    assert "a-wrong-token" not in str(caught.value)
    assert all(request.status == 403 or "/.well-known" in request.path for request in double.requests)
