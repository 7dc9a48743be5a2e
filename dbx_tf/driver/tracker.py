"""Writes one MLflow run: the driver alone opens it, writes it and ends it.

Runs on: driver.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from dbx_tf.cluster import without_password
from dbx_tf.driver.interrupts import uninterrupted
from dbx_tf.driver.mlflow_calls import Snapshot, WorkerCalls
from dbx_tf.driver.models import Registration, log_saved_model
from dbx_tf.driver.parameters import describe
from dbx_tf.driver.secrets import Secrets
from dbx_tf.driver.tracking import Tracking, answering_soon, explain_refusal
from dbx_tf.errors import TrackingError
from dbx_tf.wire.events import Call, Metrics, Upload

logger = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 60.0
_MAX_METRICS: Final = 1000
"""Metric values that MLflow takes in one request."""


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

    def snapshot(self) -> Snapshot | None:
        """No run is open."""
        return None


class Tracker(NullTracker):
    """One open MLflow run."""

    def __init__(self, settings: Tracking, secrets: Secrets) -> None:
        """Open the run: the caller's active run if there is one, else a new one.

        Raises:
            TrackingError: If MLflow can't be reached or refuses, or has no place for the model's name.
        """
        import mlflow
        from mlflow.tracking._tracking_service.utils import _get_store

        self._settings, self._uri, self._secrets = settings, settings.resolved_uri(), secrets
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
        self._client = mlflow.MlflowClient(self._uri)
        self._registration = Registration(self._client, settings, secrets)
        try:
            with answering_soon():
                self._registration.reserve()
                run = active or self._open()
        except Exception as error:
            self._registration.release()
            mlflow.set_tracking_uri(self._previous_uri)
            if isinstance(error, TrackingError):
                raise
            raise TrackingError(secrets.mask(explain_refusal(self._uri, error))) from error
        self.run_id = str(run.info.run_id)
        self._calls = WorkerCalls(_get_store(self._uri), self.run_id, run.info.experiment_id)
        self._step_offset = 0 if self._is_ours else self._steps_logged()
        self._unwritten: list[Any] = []
        self._num_refused = 0
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

        is_last = False
        while not is_last:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            is_last = None in batch
            self._unwritten += [
                Metric(name, value, m.timestamp_ms, m.step + (self._step_offset if m.is_epoch else 0))
                for m in batch
                if m is not None
                for name, value in m.values.items()
            ]
            self._write_metrics()

    def _write_metrics(self) -> None:
        """Write what is not written yet; what MLflow does not take now is tried again with the next metrics."""
        from mlflow.exceptions import MlflowException

        size = _MAX_METRICS
        try:
            while part := self._unwritten[:size]:
                try:
                    self._client.log_batch(self.run_id, metrics=part)
                except MlflowException as error:
                    if error.error_code != "INVALID_PARAMETER_VALUE":
                        raise
                    if len(part) > 1:
                        size = 1  # to find the one that can't be logged
                        continue
                    self._num_refused += 1
                del self._unwritten[: len(part)]
        except Exception as error:  # noqa: BLE001  # a tracking server that is away must not end the training
            logger.warning("MLflow did not take %d metrics yet: %s", len(part), self._secrets.mask(str(error)))

    def lost(self) -> str | None:
        """Write what is queued; what could not be logged, as a sentence."""
        self._stop_writer()
        if not (lost := self._num_refused + len(self._unwritten)):
            return None
        return f"{lost} metric values could not be written to MLflow at {self._uri}; they are in result.history"

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters; values that say nothing as text are described, names that look like secrets are masked.

        A parameter can be written once in a run: in a run that already has it with another value, it is logged under
        the first free name of `name.2`, `name.3`, ...
        """
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        written = []
        for name, value in params.items():
            text = self._secrets.mask(describe(name, value))
            key, number = name, 1
            while known.get(key, text) != text:
                number += 1
                key = f"{name}.{number}"
            written.append(Param(key, text))
        uninterrupted(self._client.log_batch, self.run_id, params=written)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the run."""
        from mlflow.entities import RunTag

        masked = [RunTag(name, self._secrets.mask(value)) for name, value in tags.items()]
        uninterrupted(self._client.log_batch, self.run_id, tags=masked)

    def log_text(self, text: str, path: str) -> None:
        """Keep a text as an artifact."""
        self._client.log_text(self.run_id, text, path)

    def log_folder(self, folder: Path, path: str) -> None:
        """Keep the files of a folder as artifacts under `path`."""
        self._client.log_artifacts(self.run_id, str(folder), path)

    def log_model(self, folder: Path) -> None:
        """Log the model whose MLflow folder the chief has sent, and register it if that was asked for.

        Raises:
            TrackingError: If MLflow or the registry refuses.
        """
        if not (folder / "MLmodel").exists():
            self.log_folder(folder, "model")  # weights of a model that could not be saved whole
            self._registration.refuse_weights()
            return
        try:
            self.model_uri = uninterrupted(log_saved_model, folder, self.run_id)
            uninterrupted(self._registration.complete, self.model_uri)
        except Exception as error:
            where = f"; the model is logged as {self.model_uri}" if self.model_uri else ""
            text = self._secrets.mask(f"MLflow refused the model: {error}{where}")
            raise TrackingError(text, run_id=self.run_id) from error

    def finish(self, status: str) -> None:
        """Write what is queued; end the run with FINISHED, FAILED or KILLED, unless it is the caller's."""
        import mlflow

        self._stop_writer()
        self._registration.release()
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

    def snapshot(self) -> Snapshot | None:
        """The run as it is now."""
        run = self._client.get_run(self.run_id)
        return Snapshot(run, self._client.get_experiment(run.info.experiment_id))

    def upload(self, worker_index: int, upload: Upload, body: IO[bytes]) -> None:
        """Log a file that user code gave to MLflow inside train_fn."""
        self._calls.upload(worker_index, upload.artifact_uri, upload.path, body)
