"""The one strategy of a training process, and how train_fn gets it by any of its names.

Runs on: workers, in the training process only: importing this module imports TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, cast

import tensorflow as tf

from dbx_tf.errors import ConfigError
from dbx_tf.worker.global_batch import GlobalBatches, Part, split
from dbx_tf.worker.step import current, stepping

_KERAS: Final = ("keras.", "tf_keras.", "dbx_tf.worker.keras_loop")
_MultiWorker: Any = tf.distribute.MultiWorkerMirroredStrategy
_ON_READ: Any = tf.VariableSynchronization.ON_READ


class KerasMultiWorkerStrategy(_MultiWorker):  # type: ignore[misc]  # TensorFlow is untyped
    """A MultiWorkerMirroredStrategy on which Keras trains as on one machine.

    Only public methods of `tf.distribute.Strategy` are overridden, and only for what Keras calls: user code gets
    TensorFlow's own answers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Python calls __init__ again on the instance that the patched __new__ hands out.
        if hasattr(self, "_dbx_tf_share"):
            return
        super().__init__(*args, **kwargs)
        resolver = self.cluster_resolver
        self._dbx_tf_num_workers = max(len(resolver.cluster_spec().as_dict().get("worker", ())), 1)
        self._dbx_tf_worker_index = int(resolver.task_id or 0)
        self._dbx_tf_num_replicas = int(super().num_replicas_in_sync)
        with self.scope():
            self._dbx_tf_share = tf.Variable(
                1.0, trainable=False, synchronization=_ON_READ, aggregation=tf.VariableAggregation.SUM
            )

    @property
    def num_replicas_in_sync(self) -> Any:
        """See `tf.distribute.Strategy.num_replicas_in_sync`; a train_step that reads it knows how to scale its loss."""
        if (step := current()) is not None:
            if _calling_module() == "tf_keras.src.engine.compile_utils":
                return step.unscale(tf.constant(1.0))  # it reports a summed loss times this
            step.is_scaled = True
        return int(super().num_replicas_in_sync)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduce over replicas, see `tf.distribute.Strategy.reduce`.

        Keras 3 (3.15.1 and the development version of August 2026, keras/src/backend/tensorflow/trainer.py) makes two
        calls that TensorFlow refuses when each worker holds its own values. They get what Keras means by them.
        """
        if isinstance(value, dict | list | tuple) and _calling_module().startswith("keras."):
            # _maybe_symbolic_build reduces a batch only to learn its shapes and dtypes.
            batch = value.batch if isinstance(value, Part) else value
            return tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], batch)
        if axis is not None:
            local = self.experimental_local_results(value)[0]
            if tf.is_tensor(local) and local.shape.rank == 0:
                axis = None  # reduce_per_replica asks for the mean over axis 0 of scalars: over the replicas
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Distribute a dataset, see `tf.distribute.Strategy.experimental_distribute_dataset`.

        Keras's datasets are split batch by batch, so that each step sees the rows that it sees on one machine. With
        AutoShardPolicy.FILE or HINT TensorFlow splits them, as its documentation says.
        """
        caller = _calling_module()
        policy = dataset.options().experimental_distribute.auto_shard_policy.name
        if not caller.startswith(_KERAS) or policy not in ("AUTO", "DATA") or self._dbx_tf_num_replicas == 1:
            try:
                return super().experimental_distribute_dataset(dataset, options)
            except tf.errors.NotFoundError as error:
                if "unshardable" not in str(error):
                    raise
                raise ConfigError(
                    f"a dataset has AutoShardPolicy.{policy} but reads no files that could be shared out; "
                    "use AutoShardPolicy.DATA"
                ) from error
        place = (self._dbx_tf_worker_index, self._dbx_tf_num_workers)
        if caller.startswith("tf_keras."):
            parts = split(self, dataset, *place)  # tf_keras takes only TensorFlow's own iterators
            return self.distribute_datasets_from_function(lambda _: parts)
        return GlobalBatches(self, dataset, *place)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Run on each replica, see `tf.distribute.Strategy.run`; a step of Keras learns its share of the batch."""
        is_part = bool(args) and isinstance(args[0], Part)
        if self._dbx_tf_num_replicas == 1 or not (is_part or _calling_module().startswith(_KERAS)):
            return super().run(fn, args, kwargs, options)
        share, batch = args[0] if is_part else (None, args[0])
        step = stepping(fn, self._dbx_tf_num_replicas, self._dbx_tf_share)
        return super().run(step, (share, batch, *args[1:]), kwargs, options)


def _calling_module() -> str:
    # Frames: this function, a method of the strategy, its caller.
    return str(sys._getframe(2).f_globals.get("__name__", ""))


_is_patched = False
_built: KerasMultiWorkerStrategy | None = None
_tell: Callable[[str], None] = print


def use_for_all_names(strategy: Any, tell: Callable[[str], None]) -> None:
    """Make this strategy what MultiWorkerMirroredStrategy() and MirroredStrategy() return, however imported.

    The classes stay what they are, since Keras and users call isinstance on them; only making an instance is changed,
    so it does not matter whether train_fn writes `tf.distribute.X` or a name that it imported before.

    Args:
        strategy: What to hand out; None gives the classes their own behaviour back.
        tell: Called with a plain sentence when train_fn asks for something that it does not get as asked.
    """
    global _built, _tell, _is_patched  # noqa: PLW0603  # a process has one strategy
    _built, _tell = strategy, tell
    if not _is_patched:
        # Never undone: CPython can't restore object.__new__ on a class once __new__ was set.
        for cls in (_MultiWorker, tf.distribute.MirroredStrategy):
            cls.__new__ = staticmethod(_new)
        _is_patched = True


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    if _built is None:
        return object.__new__(cls)
    if not issubclass(cls, _MultiWorker):
        _tell(
            "train_fn asked for MirroredStrategy, which never leaves its server: on "
            f"{_built.num_replicas_in_sync} replicas it would have trained a separate model on every worker; it was "
            "given the run's MultiWorkerMirroredStrategy instead, so all workers train one model"
        )
    elif args or kwargs:
        _tell(
            "the arguments that train_fn gave to MultiWorkerMirroredStrategy have no effect: the strategy was already "
            "built for this run, since TensorFlow wants it before any other operation"
        )
    return cast("Any", _built)
