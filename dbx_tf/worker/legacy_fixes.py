"""The fixes for tf_keras (2.21), which knows several workers better than Keras 3, but not batches that don't divide.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from dbx_tf.worker.keras_fixes import (
    RANDOM_LAYERS,
    added_losses_told,
    logs_of_all_workers,
    means_by_share,
    unscaled_losses_refused,
)
from dbx_tf.worker.patching import all_of, in_step, replaced
from dbx_tf.worker.step import Step


def fixed(keras: Any, tell: Callable[[str], None]) -> AbstractContextManager[None]:
    """All fixes of tf_keras, while the context is open.

    Args:
        keras: The module `tf_keras`.
        tell: Called with a plain sentence for what is only told.
    """
    return all_of(
        losses_by_share(),
        means_by_share(keras),
        logs_of_all_workers(keras, "_validate_and_get_metrics_result"),
        random_numbers_per_replica(tell),
        normalized_without_rows(keras),
        logs_of_one_batch(keras),
        added_losses_told(keras, tell),
        unscaled_losses_refused(keras, "apply_gradients"),
    )


@contextmanager
def losses_by_share() -> Iterator[None]:
    """Count a replica's mean loss by its rows' share of the global batch (utils/losses_utils.py)."""
    from tf_keras.src.engine import compile_utils
    from tf_keras.src.utils import losses_utils

    def all_losses(step: Step, original: Any, *args: Any, **kwargs: Any) -> Any:
        step.is_scaled = True
        return original(*args, **kwargs)

    def weigh(step: Step, original: Any, losses: Any, sample_weight: Any, mask: Any, reduction: Any) -> Any:
        weights = original(losses, sample_weight, mask, reduction)
        is_mean = mask is not None and reduction in ("auto", "sum_over_batch_size")
        return weights * tf.cast(step.weight_of(mask), weights.dtype) if is_mean else weights

    with (
        replaced(losses_utils, scale_loss_for_distribution=in_step(lambda step, _, value: step.scale(value))),
        replaced(losses_utils, apply_valid_mask=in_step(weigh)),
        replaced(compile_utils.LossesContainer, __call__=in_step(all_losses)),
    ):
        yield


@contextmanager
def random_numbers_per_replica(tell: Callable[[str], None]) -> Iterator[None]:
    """Draw other random numbers on each replica (backend.py): the seeds of all workers are the same."""
    from tf_keras.src.backend import RandomGenerator

    tell_once = functools.cache(tell)

    def make_seed(_: Step, original: Any, generator: Any) -> Any:
        tell_once(RANDOM_LAYERS)
        seed = original(generator)
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return (random.randrange(2**30) if seed is None else seed) + 1_000_003 * int(replica)

    with replaced(RandomGenerator, make_legacy_seed=in_step(make_seed)):
        yield


@contextmanager
def normalized_without_rows(keras: Any) -> Iterator[None]:
    """Let a replica without rows take part in synchronized statistics (layers/normalization/batch_normalization.py)."""

    def leaves_out(original: Any) -> Any:
        return lambda layer: original(layer) and not getattr(layer, "synchronized", False)

    with replaced(keras.layers.BatchNormalization, _support_zero_size_input=leaves_out):
        yield


@contextmanager
def logs_of_one_batch(keras: Any) -> Iterator[None]:
    """Return the metrics of a batch, not their sum over the workers (engine/training.py)."""

    def of_all(original: Any) -> Any:
        def on_batch(model: Any, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
            original(model, *args, return_dict=True, **kwargs)
            logs = {metric.name: float(metric.result()) for metric in model.metrics}
            values = list(logs.values())
            return logs if return_dict else values if len(values) > 1 else values[0]

        return on_batch

    with replaced(keras.Model, train_on_batch=of_all, test_on_batch=of_all):
        yield
