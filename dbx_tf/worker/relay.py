"""Lets the user's own calls of MLflow inside train_fn reach the run, without credentials on the workers.

Runs on: workers, in the training process, loaded by MLflow itself: the package registers these classes as MLflow
plugins for `dbx-tf://` addresses, and a training process is started with such an address as its tracking URI. Calls
travel to the driver, which answers them for the chief and ignores what others write (see driver.mlflow_calls).
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.model_registry.abstract_store import AbstractStore as AbstractRegistry
from mlflow.store.tracking.abstract_store import AbstractStore

from dbx_tf.wire.channel import Body
from dbx_tf.wire.events import REGISTRY_CALLS, RELAY_SCHEME, RELAYED_CALLS, Call, Event, Reply, Upload
from dbx_tf.worker.context import ask_driver


def _call(event: Event, body: Body) -> Any:
    """Send a call to the driver and wait for its answer.

    Raises:
        MlflowException: As MLflow on the driver raised it, or if there is no driver to answer.
    """
    try:
        reply, answer = ask_driver(event, body)
    except LookupError:
        raise MlflowException(f"{RELAY_SCHEME}:// is only known inside a train_fn that dbx_tf runs") from None
    except (OSError, EOFError) as error:
        raise MlflowException(f"the driver, which logs for this worker, is gone: {error}") from None
    if not isinstance(reply, Reply):
        raise MlflowException("the run has ended, nothing more can be logged to it")
    if reply.error:
        raise MlflowException(reply.error)
    # Only the driver answers, over a connection that carries the run's token.
    return pickle.load(answer)  # noqa: S301


def _forward(method: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(Call(method=method), pickle.dumps((args, kwargs)))

    call.__name__ = method
    return call


def _refuse(method: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise MlflowException(
            f"MLflow's {method} can't be called inside train_fn; logging metrics, params, tags, artifacts and models "
            f"can; call {method} on the driver, before or after run()"
        )

    return refuse


class RelayStore(AbstractStore):  # type: ignore[misc]  # MLflow is not typed strictly
    """MLflow tracking store whose calls are answered by the driver."""

    def __init__(self, store_uri: str | None = None, artifact_uri: str | None = None) -> None:
        super().__init__()


class RelayRegistry(AbstractRegistry):  # type: ignore[misc]  # MLflow is not typed strictly
    """MLflow model registry whose calls are answered by the driver."""


def _fill(store: type, base: type, relayed: frozenset[str]) -> None:
    for name in relayed:
        setattr(store, name, _forward(name))
    for name, method in vars(base).items():
        # MLflow marks what a store must have, but does not enforce it: these would do nothing without a word.
        if getattr(method, "__isabstractmethod__", False) and name not in relayed:
            setattr(store, name, _refuse(name))


_fill(RelayStore, AbstractStore, RELAYED_CALLS)
_fill(RelayRegistry, AbstractRegistry, REGISTRY_CALLS)


class RelayArtifacts(ArtifactRepository):  # type: ignore[misc]  # MLflow is not typed strictly
    """MLflow artifact repository that hands files to the driver."""

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Log one file, see `mlflow.log_artifact`."""
        file = Path(local_file)
        self._upload(file, PurePosixPath(artifact_path or "") / file.name)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log all files of a folder, see `mlflow.log_artifacts`."""
        root = Path(local_dir)
        for file in sorted(p for p in root.rglob("*") if p.is_file()):
            self._upload(file, PurePosixPath(artifact_path or "") / file.relative_to(root).as_posix())

    def list_artifacts(self, path: str | None = None) -> Any:
        """Not offered on workers."""
        _refuse("list_artifacts")(self, path)

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        _refuse("download_artifacts")(self, remote_file_path)

    def _upload(self, file: Path, path: PurePosixPath) -> None:
        _call(Upload(artifact_uri=self.artifact_uri, path=str(path)), file)
