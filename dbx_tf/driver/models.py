"""Logs the model of a run, and registers it in MLflow's model registry.

Runs on: driver.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from dbx_tf.driver.secrets import Secrets
from dbx_tf.driver.tracking import Tracking
from dbx_tf.errors import TrackingError

logger = logging.getLogger(__name__)


def log_saved_model(folder: Path, run_id: str | None) -> str:
    """Log the model whose MLflow folder is there already; returns its URI."""
    from mlflow.models import Model

    return str(Model.log(None, _SavedModel, name="model", run_id=run_id, folder=folder).model_uri)


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


class Registration:
    """The place in the registry for the model of one run; does nothing without a registered_model_name."""

    def __init__(self, client: Any, settings: Tracking, secrets: Secrets) -> None:
        self._client, self._secrets = client, secrets
        self._name, self._alias = settings.registered_model_name, settings.model_alias
        self._has_made_name = False

    def reserve(self) -> None:
        """Find out, before training, whether there is a place of this name; if there is none, make it.

        Raises:
            TrackingError: If there can't be one.
        """
        from mlflow.exceptions import MlflowException

        if not self._name:
            return
        try:
            self._client.get_registered_model(self._name)
        except MlflowException:  # missing, or not to be read: registries say both in many ways
            try:
                self._client.create_registered_model(self._name)
            except MlflowException as error:
                text = f"the model can't be registered as {self._name} ({error}); Unity Catalog wants a catalog and a "
                text += "schema that are there, with USE CATALOG, USE SCHEMA and CREATE MODEL for you, and a model of "
                text += "this name to be yours; or leave registered_model_name out"
                raise TrackingError(self._secrets.mask(text)) from error
            self._has_made_name = True

    def complete(self, model_uri: str) -> None:
        """Register the model, and give it its alias."""
        import mlflow

        if not self._name:
            return
        version = mlflow.register_model(model_uri, self._name)
        if self._alias:
            self._client.set_registered_model_alias(self._name, self._alias, version.version)

    def refuse_weights(self) -> None:
        """Weights without a model can't be registered.

        Raises:
            TrackingError: If a model was to be.
        """
        if self._name:
            text = f"weights alone can't be registered as {self._name}; they are in the run's artifacts, in model/"
            raise TrackingError(text)

    def release(self) -> None:
        """Take away the place that was made if no model has come into it."""
        if not self._has_made_name:
            return
        try:
            if not self._client.search_model_versions(f"name='{self._name}'"):
                self._client.delete_registered_model(self._name)
        except Exception as error:  # noqa: BLE001  # the cause of the failure counts more
            text = self._secrets.mask(str(error))
            logger.warning("the registered model %s has no version and could not be deleted: %s", self._name, text)
