"""Where and how a run is logged to MLflow: the settings.

Runs on: driver.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dbx_tf.cluster import without_password
from dbx_tf.errors import ArgumentProblem, Problem, TrackingProblem

_OPEN_RETRIES: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""While the run is opened: an address where nobody answers is told in seconds, not after four minutes."""


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where and how a run is logged to MLflow."""

    tracking_uri: str | None = field(default=None, repr=False)
    """Tracking server or database; None: the one that MLflow is set to, which without any setting is a sqlite file."""
    experiment: str | None = None
    """Experiment name, made if it does not exist; None: the one that MLflow is set to."""
    run_name: str | None = None
    """Name of the run; None: MLflow makes one up."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the run, besides dbx_tf's own."""
    registered_model_name: str | None = None
    """Register the model under this name (`catalog.schema.model` in Unity Catalog)."""
    model_alias: str | None = None
    """Alias that the registered version gets, such as `champion`."""
    log_model: bool = True
    """Log the final model."""
    enabled: bool = True
    """False: nothing goes to MLflow, metrics are in the result alone, and mlflow.log_* in train_fn is an error."""

    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with these settings, found without asking the server."""
        if not self.enabled:
            return ()
        found = []
        uri = self.resolved_uri()
        is_file_store = uri.startswith("file:") or ("://" not in uri and not uri.startswith("databricks"))
        if is_file_store and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() != "true":
            fix = f"use a database file, tracking_uri='sqlite:///{Path('mlflow.db').resolve()}', or a server"
            what = f"tracking_uri={uri!r} is MLflow's file store"
            found.append(ArgumentProblem("error", what, "MLflow 3 no longer writes to file stores", fix))
        if self.model_alias and not self.registered_model_name:
            what, possible = (
                f"model_alias={self.model_alias!r} without registered_model_name",
                "only a registered model has aliases",
            )
            found.append(ArgumentProblem("error", what, possible, "give registered_model_name as well"))
        if self.registered_model_name and not self.log_model:
            what, possible = "registered_model_name with log_model=False", "only a logged model can be registered"
            found.append(ArgumentProblem("error", what, possible, "leave log_model=True"))
        if self.model_alias and re.fullmatch(r"databricks(://.*)?", self.registry_uri()):
            what = f"model_alias={self.model_alias!r} in the workspace's own registry (MLFLOW_REGISTRY_URI=databricks)"
            fix = "register in Unity Catalog, MLFLOW_REGISTRY_URI=databricks-uc; or leave model_alias out"
            found.append(ArgumentProblem("error", what, "there, models have no aliases", fix))
        name, is_unity_catalog = self.registered_model_name, self.registry_uri().startswith("databricks-uc")
        if name and is_unity_catalog and not re.fullmatch(r"[^./ ]+(\.[^./ ]+){2}", name):
            what = f"registered_model_name={name!r}"
            possible = "Unity Catalog takes catalog.schema.model, without spaces and slashes"
            fix = "give all three; or set MLFLOW_REGISTRY_URI=databricks for the workspace's own registry"
            found.append(ArgumentProblem("error", what, possible, fix))
        return tuple(found)

    def registry_uri(self) -> str:
        """The model registry's URI: MLflow's setting, or what belongs to the tracking URI."""
        from mlflow.tracking._model_registry.utils import _resolve_registry_uri

        return str(_resolve_registry_uri(tracking_uri=self.resolved_uri()))

    def resolved_uri(self) -> str:
        """The tracking URI in use; a relative sqlite path is made absolute, so that it means the same everywhere."""
        import mlflow

        uri = self.tracking_uri or mlflow.get_tracking_uri()
        if not self.tracking_uri and not mlflow.is_tracking_uri_set() and uri.startswith("file:"):
            uri = "sqlite:///mlflow.db"  # the default of MLflow up to 3.6 was the file store
        relative = re.fullmatch(r"sqlite:///(?!/)(.+)", uri)
        return f"sqlite:///{Path(relative.group(1)).resolve()}" if relative else str(uri)


def check_server(settings: Tracking) -> Iterator[Problem]:
    """Whether the tracking server is there and takes these credentials; a database is not opened."""
    import mlflow

    uri = settings.resolved_uri()
    if not uri.startswith(("http:", "https:", "databricks")):
        return
    try:
        with answering_soon():
            mlflow.MlflowClient(uri).search_experiments(max_results=1)
    except Exception as error:  # noqa: BLE001  # MLflow lets errors of many packages through
        what, possible, fix = explain_refusal(uri, error).split("; ", 2)
        yield TrackingProblem("error", what, possible, fix)


def explain_refusal(uri: str, error: Exception) -> str:
    """What to say when MLflow does not take a run."""
    text = (str(error).strip().splitlines() or [""])[0]
    return without_password(
        f"MLflow at {uri} does not take a run ({type(error).__name__}: {text}); "
        "a server that is up and takes the driver's credentials is needed; "
        "check the address and MLFLOW_TRACKING_USERNAME and _PASSWORD, or _TOKEN; "
        "or train without it: Tracking(enabled=False)"
    )


@contextlib.contextmanager
def answering_soon() -> Iterator[None]:
    """Have MLflow give up soon on a server that does not answer, unless its user has said how long to try."""
    before = {name: os.environ.get(name) for name in _OPEN_RETRIES}
    os.environ.update({name: value for name, value in _OPEN_RETRIES.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
