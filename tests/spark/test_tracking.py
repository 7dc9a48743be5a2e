"""The MLflow run of a training: what is in it, against a real store and a real server."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbx_tf import Runner, Tracking, TrackingError

from . import train_fns
from .conftest import CLASSIC, mlflow_server

PASSWORD = "a-password-of-the-tests"


def test_a_run_holds_everything(spark: Any, tracking: Tracking, client: Any) -> None:
    """Params, tags, metrics per epoch, artifacts and the model of a run are where one looks for them."""
    settings = Tracking(tracking_uri=tracking.tracking_uri, run_name="complete", tags={"team": "vision"})
    result = Runner(num_slots=2, tracking=settings).run(train_fns.fit_and_return_weights, epochs=3)
    run = client.get_run(result.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "complete"
    params, tags = run.data.params, run.data.tags
    assert params["epochs"] == "3"
    assert {"dbx_tf.num_slots", "dbx_tf.num_workers", "dbx_tf.launcher", "dbx_tf.seed"} <= params.keys()
    assert tags["team"] == "vision"
    assert tags["dbx_tf.topology"] == "2 workers on 1 host, 2 replicas in sync"
    assert {"dbx_tf.version.tensorflow", "dbx_tf.version.keras", "dbx_tf.worker_0", "dbx_tf.worker_1"} <= tags.keys()
    names = ("loss", "accuracy", "val_loss", "val_accuracy", "epoch_seconds", "examples_per_second")
    for name in names:
        history = client.get_metric_history(result.run_id, name)
        assert [metric.step for metric in history] == [0, 1, 2], name
        assert [metric.value for metric in history] == pytest.approx(result.history[name])
    files = {artifact.path for artifact in client.list_artifacts(result.run_id)}
    assert {"topology.json", "model_summary.txt", "history.json", "logs"} <= files
    log = Path(client.download_artifacts(result.run_id, "logs/worker_1.log")).read_text()
    assert "Epoch 3/3" in log
    assert "Dense" in Path(client.download_artifacts(result.run_id, "model_summary.txt")).read_text()
    outputs = client.get_run(result.run_id).outputs.model_outputs
    assert [f"models:/{output.model_id}" for output in outputs] == [result.model_uri]


def ask_for_mirrored_strategy() -> None:
    """The mistake that dbx_tf tells of."""
    import tensorflow as tf

    tf.distribute.MirroredStrategy()


def test_notices_are_a_tag_of_the_run(tracking: Tracking, client: Any) -> None:
    result = Runner(num_slots=1, local_mode=True, tracking=tracking).run(ask_for_mirrored_strategy)
    tag = client.get_run(result.run_id).data.tags["dbx_tf.notices"]
    assert tag == "\n".join(result.notices)
    assert "train_fn asked for MirroredStrategy" in tag


def test_metrics_arrive_while_it_trains(spark: Any, tracking: Tracking, client: Any) -> None:
    """The first epoch is in MLflow before the last one has begun."""
    result = Runner(num_slots=1, tracking=tracking).run(train_slowly)
    points = client.get_metric_history(result.run_id, "loss")
    assert len(points) == 3
    assert points[-1].timestamp - points[0].timestamp > 1500
    assert result.value is True


def train_slowly() -> bool:
    """Wait between epochs; the chief asks MLflow what it knows of the first one."""
    import mlflow
    import tensorflow as tf

    seen = []

    class Wait(tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            time.sleep(1)
            if epoch == 2:
                run = mlflow.active_run() or mlflow.start_run()
                seen.append("loss" in mlflow.get_run(run.info.run_id).data.metrics)

    x, y = train_fns.make_data()
    train_fns.make_model(tf).fit(x, y, epochs=3, verbose=0, callbacks=[Wait()])
    return seen == [True]


@CLASSIC
@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_logged_model_predicts_as_the_trained_one(
    spark: Any, tracking: Tracking, fresh_python: Callable[..., Any], keras: str, batch_norm: bool
) -> None:
    """Loaded in a fresh process, by pyfunc and by its own flavor, the model predicts what the chief's did."""
    env = {"TF_USE_LEGACY_KERAS": "1" if keras == "tf_keras" else "0"}
    result = Runner(num_slots=2, tracking=tracking, env=env).run(train_fns.fit_and_return_model, batch_norm=batch_norm)
    flavor = "keras" if keras == "keras" else "tensorflow"
    code = f"""
sys.modules["dbx_tf"] = None  # the model must not need it
import mlflow, train_fns
mlflow.set_tracking_uri({tracking.tracking_uri!r})
uri = {result.model_uri!r}
x, _ = train_fns.make_data()
model = mlflow.pyfunc.load_model(uri)
native = mlflow.{flavor}.load_model(uri)
info = mlflow.models.get_model_info(uri)
requirements = open(mlflow.pyfunc.get_model_dependencies(uri)).read()
value = model.predict(x[:10]), native.predict(x[:10], verbose=0), str(info.signature), requirements
"""
    by_pyfunc, by_flavor, signature, requirements = fresh_python(code, env)
    _, predictions = result.value
    assert np.abs(by_pyfunc - predictions).max() <= 1e-6
    assert np.abs(by_flavor - predictions).max() <= 1e-6
    assert "inputs" in signature
    assert "outputs" in signature
    assert "(-1, 8)" in signature
    assert "(-1, 2)" in signature
    assert "tensorflow==" in requirements
    assert ("tf-keras==" if keras == "tf_keras" else "keras==") in requirements
    assert "dbx" not in requirements
    assert bool(result.notices) == batch_norm


def test_user_calls_of_mlflow_land_in_the_run(spark: Any, tracking: Tracking, client: Any) -> None:
    """set_experiment, start_run and log_* inside train_fn make no second run, count once, and end nothing."""
    before = {run.info.run_id for run in client.search_runs(["0"])}
    result = Runner(num_slots=2, tracking=tracking).run(train_fns.log_with_mlflow)
    run = client.get_run(result.run_id)
    assert result.value == result.run_id
    assert run.data.params["who"] == "0"
    assert run.data.metrics["tensor"] == 2.0
    assert [(m.step, m.value) for m in client.get_metric_history(result.run_id, "mine")] == [(3, 7.0)]
    assert run.data.metrics["after"] == 1.0
    assert run.data.tags["colour"] == "blue"
    assert Path(client.download_artifacts(result.run_id, "notes/hello.txt")).read_text() == "hello"
    assert {run.info.run_id for run in client.search_runs(["0"])} - before == {result.run_id}
    assert client.get_experiment_by_name("an experiment of the user's") is None
    assert run.info.status == "FINISHED"


def log_a_model_and_autolog() -> None:
    """Autologging and a logged model inside train_fn."""
    import mlflow
    import tensorflow as tf

    mlflow.keras.autolog(log_models=False)
    x, y = train_fns.make_data()
    model = train_fns.make_model(tf)
    model.fit(x, y, epochs=1, verbose=0)
    mlflow.keras.log_model(model, name="my_own", pip_requirements=["keras"])


@CLASSIC
def test_autolog_and_log_model_inside_train_fn(spark: Any, tracking: Tracking, client: Any) -> None:
    """Both work on the chief, are harmless on the others, and make no second run."""
    import mlflow

    before = {run.info.run_id for run in client.search_runs(["0"])}
    result = Runner(num_slots=2, tracking=tracking).run(log_a_model_and_autolog)
    assert {run.info.run_id for run in client.search_runs(["0"])} - before == {result.run_id}
    models = client.search_logged_models(["0"], filter_string=f"source_run_id = '{result.run_id}'")
    assert sorted(model.name for model in models) == ["model", "my_own"]
    (own,) = [model for model in models if model.name == "my_own"]
    assert mlflow.artifacts.load_text(f"{own.artifact_location}/MLmodel").count("keras")


def test_the_callers_active_run_is_used_and_left_open(spark: Any, tracking: Tracking, client: Any) -> None:
    """Inside `with mlflow.start_run()`, runs log there: params side by side, steps one after another."""
    import mlflow

    runner = Runner(num_slots=1, local_mode=True, tracking=tracking)
    with mlflow.start_run() as run:
        for epochs in (2, 1):
            assert runner.run(train_fns.fit_and_return_weights, epochs=epochs).run_id == run.info.run_id
            assert client.get_run(run.info.run_id).info.status == "RUNNING"
    data = client.get_run(run.info.run_id).data
    assert (data.params["epochs"], data.params["epochs.2"]) == ("2", "1")
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [0, 1, 2]


def test_an_active_run_elsewhere_is_told(tracking: Tracking, tmp_path: Path) -> None:
    """A run that is open at one store can't be continued at another: that is refused, and the run stays open."""
    import mlflow

    mlflow.set_tracking_uri(tracking.tracking_uri)
    other = Tracking(tracking_uri=f"sqlite:///{tmp_path}/other.db")
    with mlflow.start_run() as run:
        with pytest.raises(TrackingError, match="a training is logged in one place"):
            Runner(num_slots=1, local_mode=True, tracking=other).run(train_fns.no_training)
        assert mlflow.active_run().info.run_id == run.info.run_id
    assert mlflow.get_tracking_uri() == tracking.tracking_uri
    mlflow.set_tracking_uri(None)


@CLASSIC
def test_secrets_and_large_values_do_not_become_params(spark: Any, tracking: Tracking, client: Any) -> None:
    """A password is masked, an array is described."""
    train = {
        "password": "hunter2",
        "store": {"api_key": "hunter2", "n": 1},
        "data": np.zeros((3, 4), "float32"),
        "names": list(range(1000)),
        "rate": 0.1,
    }
    result = Runner(num_slots=1, local_mode=True, tracking=tracking).run(lambda **kwargs: None, **train)
    params = client.get_run(result.run_id).data.params
    assert params["password"] == "***"
    assert params["store"] == '{"api_key": "***", "n": 1}'
    assert params["data"] == "ndarray float32 [3, 4]"
    assert params["names"] == "list of 1000 items"
    assert params["rate"] == "0.1"


def test_default_store_is_an_absolute_database(fresh_python: Callable[..., Any], tmp_path: Path) -> None:
    """With nothing configured, the run is in mlflow.db where the driver was started, whatever its folder is later."""
    code = """
import os, mlflow, train_fns
from dbx_tf import Runner
start = os.getcwd()
def train_fn():
    mlflow.log_metric("x", 1.0)
os.environ.pop("MLFLOW_TRACKING_URI", None)
runner = Runner(num_slots=2, local_mode=True)
uri = runner.plan().tracking_uri
result = runner.run(train_fn)
again = runner.plan().tracking_uri
value = uri, start, mlflow.MlflowClient(uri).get_run(result.run_id).data.metrics, mlflow.is_tracking_uri_set(), again
"""
    uri, start, metrics, is_set, again = fresh_python(code)
    assert uri == f"sqlite:///{start}/mlflow.db"
    assert metrics["x"] == 1.0
    assert not is_set
    assert again == uri
    assert len(list(tmp_path.rglob("mlflow.db"))) == 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real MLflow server over HTTP that wants a name and a password."""
    folder = tmp_path_factory.mktemp("server")
    settings = folder / "auth.ini"
    settings.write_text(
        "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
        f"admin_password = {PASSWORD}\ndatabase_uri = sqlite:///{folder}/auth.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    env = {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "only-for-tests",
    }
    options = ("--app-name", "basic-auth", "--artifacts-destination", str(folder / "artifacts"))
    with mlflow_server(folder, *options, env=env) as address:
        yield address


def test_a_server_that_wants_a_password(
    spark: Any, server: str, monkeypatch: pytest.MonkeyPatch, fresh_python: Callable[..., Any]
) -> None:
    """The driver's credentials are enough: the workers have none, and train_fn's own calls arrive all the same."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)

    def train_fn() -> Any:

        os.environ.pop("MLFLOW_TRACKING_USERNAME", None)  # local Spark's workers inherit them; a cluster's do not
        os.environ.pop("MLFLOW_TRACKING_PASSWORD", None)
        train_fns.log_with_mlflow()
        return train_fns.fit_and_return_weights()

    tracking = Tracking(
        tracking_uri=server, experiment="over http", registered_model_name="digits", model_alias="champion"
    )
    result = Runner(num_slots=2, tracking=tracking).run(train_fn)
    client = MlflowClient(server)
    run = client.get_run(result.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["who"] == "0"
    assert run.data.metrics["loss"] == pytest.approx(result.history["loss"][-1])
    assert client.get_experiment(run.info.experiment_id).name == "over http"
    assert client.get_model_version_by_alias("digits", "champion").version == "1"
    artifacts = {a.path for a in client.list_artifacts(result.run_id, "notes")}
    assert artifacts == {"notes/hello.txt"}
    env = {"MLFLOW_TRACKING_URI": server}
    weights = fresh_python(
        "import mlflow\nvalue = mlflow.keras.load_model('models:/digits@champion').get_weights()", env
    )
    assert max(np.abs(a - b).max() for a, b in zip(weights, result.value["weights"], strict=True)) == 0.0


@CLASSIC
def test_a_wrong_password_is_told_before_training(spark: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right password nothing starts, and the error says which settings to check."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-password")
    with pytest.raises(TrackingError, match=r"does not take a run.*MLFLOW_TRACKING_USERNAME") as caught:
        Runner(num_slots=2, tracking=Tracking(tracking_uri=server)).run(train_fns.no_training)
    assert "wrong-password" not in str(caught.value)
