"""Keeps MLflow at the relay when train_fn sets the address that the driver logs to.

Notebooks do that (`mlflow.set_tracking_uri("databricks")`, `mlflow.set_registry_uri("databricks-uc")`), and would need
credentials on the workers. Another address is the user's own affair, and is set.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from dbx_tf.cluster import without_password

_DATABRICKS: Final = "databricks"


def stay_at_relay(driver_addresses: Sequence[str]) -> None:
    """Have MLflow, once train_fn imports it, take these addresses for the one that it was started with."""
    sys.meta_path.insert(0, _Watcher(driver_addresses))


class _Watcher(MetaPathFinder):
    """Waits for the import of MLflow, which costs too much to be done for a train_fn that does not use it."""

    def __init__(self, driver_addresses: Sequence[str]) -> None:
        self._addresses = driver_addresses

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """As Python's own finders, but of MLflow alone."""
        if name != "mlflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._pin(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec

    def _pin(self, mlflow: Any) -> None:
        mlflow.set_tracking_uri(mlflow.get_tracking_uri())  # what is set counts more than a variable set later on
        for name in ("set_tracking_uri", "set_registry_uri"):
            replacement = self._ignoring(getattr(mlflow, name))
            for module in (mlflow, mlflow.tracking):
                setattr(module, name, replacement)

    def _ignoring(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_uri(uri: Any) -> None:
            text = without_password(str(uri))
            is_databricks = text.startswith(_DATABRICKS) and any(a.startswith(_DATABRICKS) for a in self._addresses)
            if not is_databricks and text not in self._addresses:
                original(uri)

        return set_uri
