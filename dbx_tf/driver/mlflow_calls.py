"""Answers what user code says to MLflow inside train_fn, in place of a tracking server.

Runs on: driver, with the driver's credentials; worker.relay sends the calls.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dbx_tf.errors import TrackingError
from dbx_tf.wire.channel import save_body
from dbx_tf.wire.events import REGISTRY_CALLS, RELAY_SCHEME, RELAYED_CALLS


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run as it is at one time, in place of a tracking store that can't be reached: writes are taken, and forgotten.

    Its methods are those of MLflow's store that WorkerCalls uses.
    """

    run: Any
    experiment: Any

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return str(self.run.info.run_id)

    @property
    def experiment_id(self) -> str:
        """Id of its experiment."""
        return str(self.run.info.experiment_id)

    def get_run(self, run_id: str) -> Any:
        """The run."""
        return copy.deepcopy(self.run)

    def get_experiment(self, experiment_id: str) -> Any:
        """Its experiment."""
        return self.experiment

    def __getattr__(self, method: str) -> Any:
        if method.startswith(("get_", "search_", "__")):
            raise AttributeError(f"{method} can't be answered before the end: the workers can't reach the driver")
        return lambda *args, **kwargs: None


class WorkerCalls:
    """The workers' view of one run.

    The chief's calls are for this run, whatever run or experiment they meant to open. What other workers write is
    dropped, so that it is there once. The run's status is left alone: it is not a worker's to end.
    """

    def __init__(self, store: Any, run_id: str, experiment_id: str) -> None:
        self._store, self._run_id, self._experiment_id = store, run_id, experiment_id

    def answer(self, worker_index: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of MLflow's tracking store, or of its model registry.

        Raises:
            TrackingError: If it is none that workers may make.
            MlflowException: As MLflow raises it.
        """
        if method in REGISTRY_CALLS:
            return self._answer_for_registry(worker_index, method, args, kwargs)
        if method not in RELAYED_CALLS:
            raise TrackingError(f"{method} can't be called from a worker", run_id=self._run_id)
        store = self._store
        if method in ("create_run", "get_run", "update_run_info"):
            run = _for_worker(store.get_run(self._run_id))
            return run.info if method == "update_run_info" else run
        if method in ("get_experiment", "get_experiment_by_name"):
            return store.get_experiment(self._experiment_id)
        if method == "create_experiment":
            return self._experiment_id
        is_reading = method.startswith(("get_", "search_")) and method != "get_logged_model"
        if not is_reading and (worker_index != 0 or (isinstance(store, Snapshot) and "logged_model" in method)):
            return self._pretend(method)
        if method == "create_logged_model":
            names = ("experiment_id", "name", "source_run_id", "tags", "params", "model_type")  # MLflow 3.0 to 3.17
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            args, kwargs = (), {**given, "experiment_id": self._experiment_id, "source_run_id": self._run_id}
        return _for_worker(getattr(store, method)(*args, **kwargs))

    def _answer_for_registry(
        self, worker_index: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        import mlflow
        from mlflow.entities.model_registry import ModelVersion, RegisteredModel
        from mlflow.store.model_registry.abstract_store import AbstractStore

        given = inspect.signature(getattr(AbstractStore, method)).bind(None, *args, **kwargs).arguments
        name = given["name"]
        if method == "create_registered_model":  # registering a version makes it where it is missing
            return RegisteredModel(name)
        if worker_index != 0 or isinstance(self._store, Snapshot):
            return None if method.startswith("set_") else ModelVersion(name, "0", 0)
        client = mlflow.MlflowClient()  # the tracker has set MLflow to its store
        if method == "create_model_version":
            tags = {tag.key: tag.value for tag in given.get("tags") or ()}
            # The source that the worker knows is at the relay; a registry takes what is logged by its id.
            return mlflow.register_model(f"models:/{given['model_id']}", name, tags=tags or None)
        if method == "get_model_version":
            return client.get_model_version(name, given["version"])
        return client.set_registered_model_alias(name, given["alias"], given["version"])

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

        client = MlflowClient()  # the tracker has set MLflow to its store
        with tempfile.TemporaryDirectory(prefix="dbx_tf-") as folder:
            save_body(body, Path(folder, inside))
            kind, _, model_id = artifact_uri.removeprefix(f"{RELAY_SCHEME}:/").partition("/")
            if kind == "model":
                client.log_model_artifacts(model_id, folder)
            else:
                client.log_artifacts(self._run_id, folder)

    def _pretend(self, method: str) -> Any:
        """What a worker gets whose models are not logged: nothing, or a model that is nowhere."""
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
