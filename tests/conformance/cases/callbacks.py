"""Callbacks of Keras's, with files and without, and of users' own."""

import contextlib
import json
from pathlib import Path
from typing import Any

from .table import BATCH, case, compiled, data, fit, result


def shared(name: str) -> str:
    """A path that is the same on all workers, and another in each run of the table."""
    import os

    return str(Path(os.environ["DBX_TF_CONFORMANCE_FOLDER"], name))


def _fit(keras: Any, *callbacks: Any, **fit_args: Any) -> Any:
    arguments = {"batch_size": BATCH, "epochs": 4, "validation_data": data(67), **fit_args}
    return fit(keras, *data(131), callbacks=list(callbacks), **arguments)


@case()
def early_stopping(keras: Any) -> Any:
    stop = keras.callbacks.EarlyStopping(monitor="val_accuracy", patience=1, restore_best_weights=True)
    return _fit(keras, stop, epochs=8)


@case()
def reduce_lr_on_plateau(keras: Any) -> Any:
    return _fit(keras, keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=1.0))


@case()
def learning_rate_scheduler(keras: Any) -> Any:
    return _fit(keras, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5))


@case("refused", "the weights of worker 1 are no longer those of worker 0")
def learning_rate_of_each_worker_its_own(keras: Any) -> Any:
    from dbx_tf import get_context

    rate = 0.1 / (1 + get_context().worker_index)
    return _fit(keras, keras.callbacks.LearningRateScheduler(lambda epoch: rate))


@case(three=True)
def model_checkpoint_to_one_path(keras: Any) -> Any:
    path = shared("best.keras")
    model = compiled(keras)
    callback = keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)
    arguments = {"batch_size": BATCH, "epochs": 3, "verbose": 0, "callbacks": [callback]}
    history = model.fit(*data(131), validation_data=data(67), **arguments)
    loaded = keras.models.load_model(path)
    return result(model, history, loaded=loaded.get_weights())


@case()
def model_checkpoint_of_weights_every_step(keras: Any) -> Any:
    path = shared("step-{epoch}.weights.h5")
    return _fit(keras, keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2))


def _interrupted(keras: Any, folder: str, **arguments: Any) -> Any:
    class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise InterruptedError

    model = compiled(keras)
    arguments = {"batch_size": BATCH, "epochs": 4, "verbose": 0, "shuffle": False, **arguments}
    with contextlib.suppress(InterruptedError):
        model.fit(*data(131), callbacks=[keras.callbacks.BackupAndRestore(folder), Interrupt()], **arguments)
    again = compiled(keras, keras.models.clone_model(model))
    history = again.fit(*data(131), callbacks=[keras.callbacks.BackupAndRestore(folder)], **arguments)
    return result(again, history, epochs=history.epoch)


@case()
def backup_and_restore(keras: Any) -> Any:
    return _interrupted(keras, shared("backup"))


@case("refused", "a callback has restored different states", legacy="absent")
def backup_that_one_worker_can_not_see(keras: Any) -> Any:
    from dbx_tf import get_context

    folder = shared(f"backup-of-worker-{get_context().worker_index}")
    if get_context().is_chief:
        Path(folder).mkdir()
        Path(folder, "training_metadata.json").write_text('{"epoch": 1, "batch": 0}')
    return _fit(keras, keras.callbacks.BackupAndRestore(folder))


@case()
def csv_logger(keras: Any) -> Any:
    path = shared("log.csv")
    outcome = _fit(keras, keras.callbacks.CSVLogger(path))
    return {**outcome, "lines": len(Path(path).read_text().splitlines())}


@case()
def tensorboard(keras: Any) -> Any:
    folder = shared("tensorboard")
    outcome = _fit(keras, keras.callbacks.TensorBoard(folder, update_freq=1))
    return {**outcome, "files": len(list(Path(folder, "train").glob("*tfevents*")))}


@case()
def terminate_on_nan(keras: Any) -> Any:
    x, y = data(131)
    x[BATCH + BATCH // 2 + 1] = float("nan")  # a row of worker 1
    model = compiled(keras)
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return {"epochs": len(history.epoch)}


@case()
def swap_ema_weights(keras: Any) -> Any:
    callback = getattr(keras.callbacks, "SwapEMAWeights", None)
    model = compiled(keras, optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
    callbacks = [callback(swap_on_epoch=True)] if callback else []
    return result(model, model.fit(*data(131), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks))


@case()
def stopped_in_mid_epoch_by_one_worker(keras: Any) -> Any:
    from dbx_tf import get_context

    context = get_context()

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and context.worker_index == context.num_workers - 1:
                self.model.stop_training = True

    return _fit(keras, Stop())


@case(three=True)
def stopped_after_an_epoch_by_one_worker(keras: Any) -> Any:
    from dbx_tf import get_context

    context = get_context()

    def stop(epoch: int, logs: Any) -> None:
        if epoch == 1 and context.worker_index == context.num_workers - 1:
            callback.model.stop_training = True

    callback = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    return _fit(keras, callback)


@case()
def logs_of_each_epoch(keras: Any) -> Any:
    seen: list[Any] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    outcome = _fit(keras, callback)
    return {**outcome, "seen": json.loads(json.dumps(seen, default=float))}
