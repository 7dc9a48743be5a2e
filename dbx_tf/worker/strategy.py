"""The one strategy of a training process, and how train_fn gets it by any of its names.

Runs on: workers, in the training process only: importing this module imports TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

_MultiWorker: Any = tf.distribute.MultiWorkerMirroredStrategy


class RunStrategy(_MultiWorker):  # type: ignore[misc]  # TensorFlow is untyped
    """The run's strategy; asking for a second one in the process gives the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Python calls __init__ again on the instance that the patched __new__ hands out.
        if not hasattr(self, "_dbx_tf_is_built"):
            super().__init__(*args, **kwargs)
            self._dbx_tf_is_built = True


class KerasMultiWorkerStrategy(RunStrategy):
    """A MultiWorkerMirroredStrategy that Keras 3 can train on.

    Keras 3 (3.15.1 and the development version of August 2026, keras/src/backend/tensorflow/trainer.py) makes two
    calls of `Strategy.reduce` that TensorFlow refuses when each worker holds its own values. Both are answered here
    with what Keras means by them; everything else goes to TensorFlow.
    """

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduce over replicas, see `tf.distribute.Strategy.reduce`."""
        if isinstance(value, dict | list | tuple) and _is_called_by_keras():
            # _maybe_symbolic_build reduces a batch only to learn its shapes and dtypes.
            return tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], value)
        if axis is not None:
            local = self.experimental_local_results(value)[0]
            if tf.is_tensor(local) and local.shape.rank == 0:
                axis = None  # reduce_per_replica asks for the mean over axis 0 of scalars: over the replicas
        return super().reduce(reduce_op, value, axis)


def _is_called_by_keras() -> bool:
    # Frames: this function, reduce, its caller. User code that reduces a structure gets TensorFlow's own answer.
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("keras.")


_is_patched = False
_built: RunStrategy | None = None
_tell: Callable[[str], None] = print


def build_strategy(*, legacy_keras: bool) -> Any:
    """Build the strategy of this process from TF_CONFIG: waits until all workers have started theirs.

    Args:
        legacy_keras: tf_keras trains on TensorFlow's own strategy.
    """
    return RunStrategy() if legacy_keras else KerasMultiWorkerStrategy()


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
