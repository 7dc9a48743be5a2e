"""The training process: a fresh interpreter that is one worker of one run.

Runs on: workers, as a child of the Spark task (or of the driver, in local mode). It dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import cloudpickle

from dbx_tf.wire.channel import ChannelAddress, Connection, Outbox, Requests, connect
from dbx_tf.wire.events import Event, Failed, Finished, Metrics, ModelFile, Notice, PortTaken, Ready, Release, Role
from dbx_tf.worker import export, inspection
from dbx_tf.worker.context import WorkerContext, set_context
from dbx_tf.worker.mlflow_address import stay_at_relay
from dbx_tf.worker.reporter import Reporter

_MAX_TEXT: Final = 100_000
"""Characters of an error or a model's summary that are passed on: far more than anybody reads."""
PORT_TAKEN_EXIT_CODE: Final = 75  # EX_TEMPFAIL of sysexits.h

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_PORT_TAKEN_TEXT: Final = "Could not start gRPC server"  # TensorFlow 2.21, UnknownError of the context
_ECHO_TYPES: Final = ("UnavailableError", "DeadlineExceededError", "AbortedError", "CancelledError")
_ECHO_TEXTS: Final = (
    "Collective ops is aborted by",
    "unhealthy (stopped sending heartbeats)",
    "coordination service",
    "failed to connect to all addresses",
    "Connection reset by peer",
    "Socket closed",
)


@dataclass(frozen=True, slots=True)
class Job:
    """What a training process needs besides its environment (TF_CONFIG and the like) and the payload."""

    worker_index: int
    num_workers: int
    attempt: int
    address: ChannelAddress
    seed: int
    """The same on all workers: an unseeded shuffle must have the same order everywhere."""
    export_model: bool
    mlflow_addresses: tuple[str, ...]
    """Addresses of MLflow's that the driver logs to."""
    parent_pid: int


def main(job_folder: str) -> int:
    """Be the worker that the job folder describes, and return the exit code of the process."""
    folder = Path(job_folder)
    job: Job = pickle.loads((folder / "job.pkl").read_bytes())  # noqa: S301  # written by our parent
    _die_with_parent(job.parent_pid)
    inspection.allow(folder)
    stay_at_relay(job.mlflow_addresses)
    exit_code = train(job, (folder / "payload.pkl").read_bytes(), folder)
    if exit_code != 0:
        # TensorFlow's orderly end would wait for workers that are about to be stopped.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def train(job: Job, payload: bytes, folder: Path) -> int:
    """Run train_fn as one worker, tell the driver how it goes, and leave when all workers may."""
    connection = connect(job.address, job.worker_index, Role.TRAINING, job.attempt)
    outbox = Outbox(connection)
    try:
        finished, value = _train(job, payload, folder, connection, outbox.put)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a train_fn that leaves by sys.exit has not returned
        outbox.put(_failure(error))
        outbox.flush()
        return PORT_TAKEN_EXIT_CODE if _PORT_TAKEN_TEXT in str(error) else 1
    outbox.flush()
    connection.send(finished, value)
    # The chief may still have been saving when others were done; TensorFlow takes a peer that leaves for a failure.
    with contextlib.suppress(EOFError, OSError):
        while not isinstance(connection.receive()[0], Release):
            pass
    connection.close()
    return 0


def _train(
    job: Job, payload: bytes, folder: Path, connection: Connection, send: Callable[[Event], None]
) -> tuple[Finished, bytes]:
    from dbx_tf.worker import agreement, keras_fixes, keras_loop, legacy_fixes, saving
    from dbx_tf.worker import strategy as strategies
    from dbx_tf.worker.fit_checks import check_fit

    legacy_keras = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    # Nothing of the user's is loaded before the strategy stands: TensorFlow refuses it after the first operation.
    strategy = strategies.KerasMultiWorkerStrategy()  # waits until all workers have started theirs
    devices = [str(device) for device in strategy.extended.worker_devices]
    send(Ready(pid=os.getpid(), devices=devices, num_replicas=strategy.num_replicas_in_sync))
    _seed(job.seed)

    def tell(text: str) -> None:
        send(Notice(text=text))

    keras = _keras(legacy_keras)
    num_replicas = strategy.num_replicas_in_sync

    def prepare(model: Any, arguments: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        if num_replicas == 1:
            return [], []
        check_fit(model, arguments, strategy, tell)
        callbacks = reporter.callbacks(arguments)
        if job.worker_index != 0:
            agreement.write_once(keras, callbacks, folder)
        first = agreement.average_statistics(keras, strategy, tell)
        return [first], [agreement.stay_together(keras, strategy, callbacks, tell)]

    reporter = Reporter(send, prepare)
    context = WorkerContext(
        strategy=strategy,
        worker_index=job.worker_index,
        num_workers=job.num_workers,
        scratch_dir=folder,
        _log=lambda key, value, step: send(Metrics(values={key: value}, step=step, is_epoch=False)),
        _ask=Requests(connection).ask,
    )
    with ExitStack() as stack:
        strategies.use_for_all_names(strategy, tell)
        stack.callback(strategies.use_for_all_names, None, print)
        set_context(context)
        stack.callback(set_context, None)
        stack.enter_context(reporter.watch(keras))
        if num_replicas > 1:
            stack.enter_context((legacy_fixes if legacy_keras else keras_fixes).fixed(keras, tell))
            stack.enter_context(saving.saved_whole(keras, folder, str(job.seed)))
            if not legacy_keras:
                stack.enter_context(keras_loop.replaced(keras))
        with strategy.scope():
            train_fn, kwargs = cloudpickle.loads(payload)
            value = train_fn(**kwargs)
        return _finish(job, value, reporter, folder / "model", connection, send)


def _keras(legacy_keras: bool) -> Any:
    if legacy_keras:
        import tf_keras

        return tf_keras
    import keras

    return keras


def _finish(
    job: Job, value: Any, reporter: Reporter, folder: Path, connection: Connection, send: Callable[[Event], None]
) -> tuple[Finished, bytes]:
    """Hand over the model and the return value. What fails here is told, since training itself is done."""
    model, is_chief = export.find_model(value, reporter.model), job.worker_index == 0
    copies: dict[int, Any] = {}
    weights: list[Any] = []
    summary = ""
    try:
        if model is not None:
            weights = model.get_weights()  # by every worker: in tf_keras a collective, and no later step may need one
        if model is not None and is_chief:
            summary = export.summarize(model)[:_MAX_TEXT]
            if export.is_legacy(model):
                copies[id(model)] = export.detach(model, weights)
            if job.export_model:
                export.save_mlflow_model(copies.get(id(model), model), folder, reporter.inputs)
                for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                    connection.send(ModelFile(path=file.relative_to(folder).as_posix()), file)
    except Exception as error:  # noqa: BLE001  # whatever Keras or MLflow can't do with this model
        reason = f"the model could not be logged ({type(error).__name__}: {error})"
        send(Notice(text=reason + (_keep_weights(weights, connection) if is_chief else "")))
    if not is_chief:
        return Finished(), b""
    pickled, value_error = _pickle(value, copies)
    return Finished(model_summary=summary, value_error=value_error), pickled


def _keep_weights(weights: list[Any], connection: Connection) -> str:
    """Save at least the weights of a model that can't be saved whole."""
    import numpy as np

    try:
        buffer = io.BytesIO()
        np.savez(buffer, *weights)
        connection.send(ModelFile(path="weights.npz"), buffer.getvalue())
    except Exception as error:  # noqa: BLE001  # a second failure must not hide the first
        return f"; its weights could not be saved either ({error})"
    return "; its weights are kept in the run's artifact weights.npz, in the order of model.get_weights()"


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Replaces models that need other workers to be read by their plain copies."""

    def __init__(self, file: IO[bytes], copies: dict[int, Any]) -> None:
        super().__init__(file)
        self._copies = copies

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._copies:
            return _same, (self._copies[id(obj)],)
        return super().reducer_override(obj)


def _same(value: Any) -> Any:
    return value


def _pickle(value: Any, copies: dict[int, Any]) -> tuple[bytes, str]:
    buffer = io.BytesIO()
    try:
        _ValuePickler(buffer, copies).dump(value)
    except Exception as error:  # noqa: BLE001  # a __reduce__ of the user's may raise anything
        return b"", f"a {type(value).__name__} that can't be pickled ({type(error).__name__}: {error})"
    return buffer.getvalue(), ""


def _failure(error: BaseException) -> Event:
    name, text = type(error).__name__, str(error)
    if _PORT_TAKEN_TEXT in text:
        return PortTaken()
    is_echo = name in _ECHO_TYPES and any(part in text for part in _ECHO_TEXTS)
    if isinstance(error, ModuleNotFoundError):
        text += (
            "; the workers don't have this module: import it at the top of the file that holds train_fn, so that it is "
            "shipped with it, or install it on the cluster"
        )
    trace = "".join(traceback.format_exception(error))
    return Failed(cause_type=name, cause_message=text[:_MAX_TEXT], traceback=trace[-_MAX_TEXT:], is_echo=is_echo)


def _seed(seed: int) -> None:
    import numpy as np
    import tensorflow as tf

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # Keras shuffles with the global generators
    tf.random.set_seed(seed)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the kernel knew
        os._exit(1)
