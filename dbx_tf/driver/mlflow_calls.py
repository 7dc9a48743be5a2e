"""Answers what user code says to MLflow inside train_fn, in place of a tracking server.

Runs on: driver, with the driver's credentials; worker.relay sends the calls.
"""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dbx_tf.errors import TrackingError
from dbx_tf.wire.channel import save_body
from dbx_tf.wire.events import RELAY_SCHEME, RELAYED_CALLS


class WorkerCalls:
    """The workers' view of one run.

    The chief's calls are for this run, whatever run or experiment they meant to open. What other workers write is
    dropped, so that it is there once. The run's status is left alone: it is not a worker's to end.
    """

    def __init__(self, uri: str, run_id: str, experiment_id: str) -> None:
        self._uri, self._run_id, self._experiment_id = uri, run_id, experiment_id

    def answer(self, worker_index: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of MLflow's tracking store.

        Raises:
            TrackingError: If it is none that workers may make.
            MlflowException: As MLflow raises it.
        """
        from mlflow.tracking._tracking_service.utils import _get_store

        if method not in RELAYED_CALLS:
            raise TrackingError(f"{method} can't be called from a worker", run_id=self._run_id)
        store = _get_store(self._uri)
        if method in ("create_run", "get_run", "update_run_info"):
            run = _for_worker(store.get_run(self._run_id))
            return run.info if method == "update_run_info" else run
        if method in ("get_experiment", "get_experiment_by_name"):
            return store.get_experiment(self._experiment_id)
        if method == "create_experiment":
            return self._experiment_id
        is_reading = method.startswith(("get_", "search_")) and method != "get_logged_model"
        if worker_index != 0 and not is_reading:
            return self._pretend(method)
        if method == "create_logged_model":
            names = ("experiment_id", "name", "source_run_id", "tags", "params", "model_type")  # MLflow 3.0 to 3.17
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            args, kwargs = (), {**given, "experiment_id": self._experiment_id, "source_run_id": self._run_id}
        return _for_worker(getattr(store, method)(*args, **kwargs))

    def upload(self, worker_index: int, artifact_uri: str, path: str, body: IO[bytes]) -> None:
        """Log a file to the run, or to a model that train_fn logs.

        Raises:
            TrackingError: If the path leads out of the run's artifacts.
        """
        if worker_index != 0:
            return
        inside = PurePosixPath(path)
        if inside.is_absolute() or ".." in inside.parts:
            raise TrackingError(f"not a path for an artifact: {path!r}", run_id=self._run_id)
        from mlflow import MlflowClient

        client = MlflowClient(self._uri)
        with tempfile.TemporaryDirectory(prefix="dbx_tf-") as folder:
            save_body(body, Path(folder, inside))
            kind, _, model_id = artifact_uri.removeprefix(f"{RELAY_SCHEME}:/").partition("/")
            if kind == "model":
                client.log_model_artifacts(model_id, folder)
            else:
                client.log_artifacts(self._run_id, folder)

    def _pretend(self, method: str) -> Any:
        """What a worker that is not the chief gets: nothing, or a model that is nowhere."""
        if method not in ("create_logged_model", "finalize_logged_model", "get_logged_model"):
            return None
        from mlflow.entities import LoggedModel

        model = LoggedModel(self._experiment_id, "m-" + "0" * 32, "not logged", "", 0, 0)
        return _for_worker(model)


def _for_worker(entity: Any) -> Any:
    """Point the artifacts of a run or a logged model at the relay: the worker can't reach the real place."""
    if hasattr(entity, "info"):
        entity.info._artifact_uri = f"{RELAY_SCHEME}:/run"
    elif hasattr(entity, "artifact_location") and hasattr(entity, "model_id"):
        entity._artifact_location = f"{RELAY_SCHEME}:/model/{entity.model_id}"
    return entity
