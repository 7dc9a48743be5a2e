"""Train Keras models on all servers of a Spark or Databricks cluster, with the train_fn you have.

Importing this package loads no TensorFlow, no Spark and no MLflow.
"""

from importlib.metadata import version

from dbx_tf.driver.plan import RunPlan
from dbx_tf.driver.result import RunResult
from dbx_tf.driver.runner import Runner
from dbx_tf.driver.tracking import Tracking
from dbx_tf.errors import ClusterError, ConfigError, DbxTfError, TrackingError, WorkerFailedError
from dbx_tf.scoring import score
from dbx_tf.worker.context import WorkerContext, get_context

__version__ = version("dbx_tf")

__all__ = [
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
]
