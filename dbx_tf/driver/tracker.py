"""Writes one MLflow run: the driver alone opens it, writes it and ends it.

Runs on: driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from dbx_tf.driver.mlflow_calls import WorkerCalls
from dbx_tf.driver.parameters import describe
from dbx_tf.driver.tracking import Tracking, without_password
from dbx_tf.errors import TrackingError
from dbx_tf.wire.events import Call, Metrics, Upload

logger = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 60.0
_OPEN_RETRIES: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""While the run is opened: an address where nobody answers is told in seconds, not after four minutes."""


class NullTracker:
    """Stands in for a tracker when tracking is off."""

    run_id: str | None = None
    model_uri: str | None = None

    def log_metrics(self, metrics: Metrics) -> None:
        """Nothing is logged."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Nothing is logged."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Nothing is logged."""

    def log_text(self, text: str, path: str) -> None:
        """Nothing is logged."""

    def log_folder(self, folder: Path, path: str) -> None:
        """Nothing is logged."""

    def log_model(self, folder: Path) -> None:
        """Nothing is logged."""

    def answer(self, worker_index: int, call: Call, arguments: tuple[Any, ...]) -> Any:
        """User code that logs inside train_fn is told, since what it logs would be lost."""
        raise TrackingError(
            "tracking is off for this run (Tracking(enabled=False)), so MLflow can't be used in train_fn"
        )

    def upload(self, worker_index: int, upload: Upload, body: IO[bytes]) -> None:
        """As `answer`."""
        self.answer(worker_index, Call(method="log_artifact"), ())

    def finish(self, status: str) -> None:
        """Nothing to end."""

    def lost(self) -> str | None:
        """Nothing can get lost."""
        return None


class Tracker(NullTracker):
    """One open MLflow run."""

    def __init__(self, settings: Tracking) -> None:
        """Open the run: the caller's active run if there is one, else a new one.

        Raises:
            TrackingError: If MLflow can't be reached or refuses.
        """
        import mlflow

        self._settings, self._uri = settings, settings.resolved_uri()
        self._previous_uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        active = mlflow.active_run()
        self._is_ours = active is None
        if active is not None and self._uri != Tracking().resolved_uri():
            raise TrackingError(
                f"the active MLflow run {active.info.run_id} is at {without_password(mlflow.get_tracking_uri())}, but "
                f"tracking_uri is {without_password(self._uri)}; a training is logged in one place; "
                "end that run, or leave tracking_uri out"
            )
        mlflow.set_tracking_uri(self._uri)
        try:
            with _environment(_OPEN_RETRIES):
                run = active or self._open()
        except Exception as error:
            mlflow.set_tracking_uri(self._previous_uri)
            raise TrackingError(_explain_refusal(self._uri, error)) from error
        self.run_id = str(run.info.run_id)
        self._client = mlflow.MlflowClient(self._uri)
        self._calls = WorkerCalls(self._uri, self.run_id, run.info.experiment_id)
        self._step_offset = 0 if self._is_ours else self._steps_logged()
        self._errors = 0
        self._queue: queue.Queue[Metrics | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write, name="dbx_tf-mlflow", daemon=True)
        self._writer.start()

    def _open(self) -> Any:
        import mlflow

        experiment_id = None
        if self._settings.experiment:
            known = mlflow.get_experiment_by_name(self._settings.experiment)
            experiment_id = known.experiment_id if known else mlflow.create_experiment(self._settings.experiment)
        return mlflow.start_run(
            run_name=self._settings.run_name, experiment_id=experiment_id, tags=dict(self._settings.tags) or None
        )

    def _steps_logged(self) -> int:
        history = self._client.get_metric_history(self.run_id, "epoch_seconds")
        return max((metric.step for metric in history), default=-1) + 1

    def log_metrics(self, metrics: Metrics) -> None:
        """Queue metrics; they are written in batches by a thread, and never hold up training."""
        self._queue.put(metrics)

    def _write(self) -> None:
        from mlflow.entities import Metric

        while (first := self._queue.get()) is not None:
            batch = [first]
            with contextlib.suppress(queue.Empty):
                while (item := self._queue.get_nowait()) is not None:
                    batch.append(item)
                self._queue.put(None)  # the sentinel was taken: leave after this batch
            metrics = [
                Metric(name, value, m.timestamp_ms, m.step + (self._step_offset if m.is_epoch else 0))
                for m in batch
                for name, value in m.values.items()
            ]
            try:
                self._client.log_batch(self.run_id, metrics=metrics)
            except Exception as error:  # noqa: BLE001  # a tracking server that is away must not end the training
                self._errors += len(metrics)
                logger.warning("MLflow refused %d metrics: %s", len(metrics), error)

    def lost(self) -> str | None:
        """Write what is queued; what could not be logged, as a sentence."""
        self._stop_writer()
        if not self._errors:
            return None
        return f"{self._errors} metric values could not be written to MLflow at {self._uri}; they are in result.history"

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters; values that say nothing as text are described, names that look like secrets are masked.

        A parameter can be written once in a run: in a run that already has it with another value, it is logged under
        the first free name of `name.2`, `name.3`, ...
        """
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        written = []
        for name, value in params.items():
            text = describe(name, value)
            key, number = name, 1
            while known.get(key, text) != text:
                number += 1
                key = f"{name}.{number}"
            written.append(Param(key, text))
        self._client.log_batch(self.run_id, params=written)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the run."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def log_text(self, text: str, path: str) -> None:
        """Keep a text as an artifact."""
        self._client.log_text(self.run_id, text, path)

    def log_folder(self, folder: Path, path: str) -> None:
        """Keep the files of a folder as artifacts under `path`."""
        self._client.log_artifacts(self.run_id, str(folder), path)

    def log_model(self, folder: Path) -> None:
        """Log the model whose MLflow folder the chief has sent, and register it if that was asked for.

        Raises:
            TrackingError: If the registry refuses.
        """
        from mlflow.models import Model

        if not (folder / "MLmodel").exists():
            self.log_folder(folder, "model")  # weights of a model that could not be saved whole
            return
        try:
            info = Model.log(None, _SavedModel, name="model", run_id=self.run_id, folder=folder)
            self.model_uri = str(info.model_uri)
            self._register()
        except Exception as error:
            where = f"; the model is logged as {self.model_uri}" if self.model_uri else ""
            raise TrackingError(f"MLflow refused the model: {error}{where}", run_id=self.run_id) from error

    def _register(self) -> None:
        import mlflow

        name = self._settings.registered_model_name
        if not name:
            return
        version = mlflow.register_model(self.model_uri, name)
        if self._settings.model_alias:
            self._client.set_registered_model_alias(name, self._settings.model_alias, version.version)

    def finish(self, status: str) -> None:
        """Write what is queued; end the run with FINISHED, FAILED or KILLED, unless it is the caller's."""
        import mlflow

        self._stop_writer()
        try:
            if self._is_ours:
                mlflow.end_run(status)
        except Exception as error:  # noqa: BLE001  # the result, or the cause of the failure, counts more
            logger.warning("MLflow could not end the run %s: %s", self.run_id, error)
        finally:
            mlflow.set_tracking_uri(self._previous_uri)

    def _stop_writer(self) -> None:
        self._queue.put(None)
        self._writer.join(_FLUSH_SECONDS)

    def answer(self, worker_index: int, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Answer a call that user code made to MLflow inside train_fn."""
        return self._calls.answer(worker_index, call.method, *arguments)

    def upload(self, worker_index: int, upload: Upload, body: IO[bytes]) -> None:
        """Log a file that user code gave to MLflow inside train_fn."""
        self._calls.upload(worker_index, upload.artifact_uri, upload.path, body)


class _SavedModel:
    """An MLflow flavor, as `Model.log` wants one, for a model that is saved already."""

    __name__ = "dbx_tf"

    @staticmethod
    def save_model(path: str, mlflow_model: Any, folder: Path) -> None:
        """Copy the saved folder and write the new model's ids into it."""
        from mlflow.models import Model

        shutil.copytree(folder, path)
        saved = Model.load(path)
        for name in ("flavors", "signature", "saved_input_example_info", "model_size_bytes"):
            setattr(mlflow_model, name, getattr(saved, name, None))
        mlflow_model.save(str(Path(path, "MLmodel")))


def _explain_refusal(uri: str, error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return without_password(
        f"MLflow at {uri} does not take a run ({type(error).__name__}: {text}); "
        "a server that is up and takes the driver's credentials is needed; "
        "check the address and MLFLOW_TRACKING_USERNAME and _PASSWORD, or _TOKEN; "
        "or train without it: Tracking(enabled=False)"
    )


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
