"""The package as a whole: its public names, and what importing it costs."""

import json
import subprocess
import sys
from importlib.metadata import version

import dbx_tf

HEAVY = ("tensorflow", "keras", "tf_keras", "pyspark", "mlflow", "numpy", "pandas")


def test_importing_dbx_tf_loads_nothing_heavy() -> None:
    """A fresh interpreter that imports dbx_tf has none of the large libraries in it."""
    code = f"import dbx_tf, json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


def test_public_names_are_those_promised() -> None:
    """The names that outside code is written against are there, and no others are exported."""
    assert set(dbx_tf.__all__) == {
        "ClusterError",
        "ConfigError",
        "DbxTfError",
        "RunPlan",
        "RunResult",
        "Runner",
        "Tracking",
        "TrackingError",
        "WorkerContext",
        "WorkerFailedError",
        "get_context",
        "score",
    }
    assert all(getattr(dbx_tf, name).__module__.startswith("dbx_tf.") for name in dbx_tf.__all__)


def test_version_is_that_of_the_package() -> None:
    """There is one source for the version."""
    assert dbx_tf.__version__ == version("dbx_tf")
