"""One small, named fix per defect of Keras on several workers, each with the test that shows it is still needed.

Runs on: workers, in the training process. `test_a_fix_is_still_needed` runs a case of each without it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import tensorflow as tf

from dbx_tf.errors import ConfigError
from dbx_tf.worker.patching import all_of, in_step, replaced
from dbx_tf.worker.step import Step

RANDOM_LAYERS: Final = (
    "layers such as Dropout draw other random numbers on each worker, as they should; the results are as good as one "
    "machine's, but not equal to them"
)
_ADDED_LOSS: Final = (
    "a layer's add_loss is taken for a mean over the rows, and averaged over the workers; if it is a sum over the "
    "rows, add the sum divided by the number of rows"
)
_UNSCALED: Final = (
    "the train_step of {name} computes its own loss; gradients are summed over {count} replicas, so it would train "
    "with {count} times the gradient; take the loss from self.compute_loss(...), or divide it by "
    "tf.distribute.get_strategy().num_replicas_in_sync inside of train_step"
)
_SUMS: Final = ("sum", "none", None)
_MEANS: Final = ("mean", "sum_over_batch_size")


def fixed(keras: Any, tell: Callable[[str], None]) -> AbstractContextManager[None]:
    """All fixes of Keras 3, while the context is open.

    Args:
        keras: The module `keras`.
        tell: Called with a plain sentence for what is only told.
    """
    return all_of(
        losses_by_share(keras),
        masked_losses_over_all_rows(),
        means_by_share(keras),
        logs_of_all_workers(keras, "_get_metrics_result_or_logs"),
        clipped_after_reduction(keras),
        random_numbers_per_replica(keras, tell),
        normalized_without_rows(keras),
        added_losses_told(keras, tell),
        unscaled_losses_refused(keras, "apply"),
    )


@contextmanager
def losses_by_share(keras: Any) -> Iterator[None]:
    """Count a replica's mean loss by its rows' share of the global batch, whatever the loss is made of.

    Keras 3 (3.15.1, losses/loss.py, trainers/trainer.py) divides by the number of replicas: wrong for a batch that
    doesn't divide evenly. It forgets losses that are scalars and those of an overridden compute_loss, which then train
    with n times the gradient. Here the parts of a loss are left as they are, and compute_loss's result is scaled.
    """
    from keras.src.losses import loss as losses

    def whole(step: Step, original: Any, *args: Any, **kwargs: Any) -> Any:
        if step.is_in_loss:
            return original(*args, **kwargs)
        step.is_in_loss = True
        try:
            loss = original(*args, **kwargs)
        finally:
            step.is_in_loss = False
        return step.scale(loss)

    def scale(step: Step, _: Any, value: Any) -> Any:
        return value if step.is_in_loss else step.scale(value)

    def unscale(step: Step, _: Any, value: Any) -> Any:
        # Losses per row (reduction "none") are a sum, which was never scaled.
        return value if step.is_in_loss or value.shape.rank else step.unscale(value)

    def reduce(
        step: Step, original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
    ) -> Any:
        value = original(values, sample_weight, reduction)
        if not step.is_in_loss:
            return value
        if reduction in _SUMS:
            return step.unscale(value)  # a sum is no mean: compute_loss's scaling makes it what it was
        return tf.reduce_sum(value)  # of no rows Keras returns no values instead of 0

    with (
        replaced(keras.Model, compute_loss=in_step(whole), _compute_loss=in_step(whole)),
        replaced(
            losses,
            scale_loss_for_distribution=in_step(scale),
            unscale_loss_for_distribution=in_step(unscale),
            reduce_values=in_step(reduce),
        ),
    ):
        yield


@contextmanager
def masked_losses_over_all_rows() -> Iterator[None]:
    """Divide by what counts in the global batch where Keras divides by what counts in a replica's part of it.

    Keras 3 (3.15.1, losses/loss.py) does so for masked outputs and for reduction="mean_with_sample_weight": parts in
    which more is masked, or weighs less, would have the same say as others.
    """
    from keras.src.losses import loss as losses

    def weigh(step: Step, original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = original(sample_weight, mask, dtype, reduction)
        is_mean = mask is not None and step.is_in_loss and reduction in _MEANS
        return weights * tf.cast(step.weight_of(mask), weights.dtype) if is_mean else weights

    def reduce(
        step: Step, original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
    ) -> Any:
        value = original(values, sample_weight, reduction)
        is_weighted = reduction == "mean_with_sample_weight" and sample_weight is not None and step.is_in_loss
        return value * tf.cast(step.weight_of(sample_weight), value.dtype) if is_weighted else value

    with replaced(losses, apply_mask=in_step(weigh), reduce_values=in_step(reduce)):
        yield


@contextmanager
def means_by_share(keras: Any) -> Iterator[None]:
    """Let a scalar that goes into a Mean count by its replica's share of the batch.

    Keras 3 (3.15.1, metrics/reduction_metrics.py) counts it once per replica; and a train_step that tracks the scaled
    loss of compute_loss, as Keras's own guide does, would report one n-th of it.
    """

    def update(step: Step, original: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and tf.is_tensor(values) and values.shape.rank == 0:
            values = step.unscale(values) if step.made(values) else tf.cast(values, metric.dtype)
            values = tf.math.multiply_no_nan(values, tf.cast(step.share > 0, values.dtype))
            sample_weight = step.share
        return original(metric, values, sample_weight=sample_weight)

    with replaced(keras.metrics.Mean, update_state=in_step(update)):
        yield


@contextmanager
def logs_of_all_workers(keras: Any, name: str) -> Iterator[None]:
    """Report a metric's result over all workers at the end of an epoch, also if train_step returns other logs too.

    Keras 3 (3.15.1, trainers/trainer.py) and tf_keras (2.21, engine/training.py) do so only if the logs are the
    metrics; else they take the last step's, which are the mean (tf_keras: the sum) of what each worker has seen.
    """

    def results(original: Any) -> Any:
        def results_or_logs(model: Any, logs: Any) -> Any:
            chosen = original(model, logs)
            own = [metric for metric in model.metrics if metric is not getattr(model, "_loss_tracker", None)]
            return {**chosen, **{metric.name: metric.result() for metric in own if metric.name in chosen}}

        return results_or_logs

    with replaced(keras.Model, **{name: results}):
        yield


@contextmanager
def clipped_after_reduction(keras: Any) -> Iterator[None]:
    """Clip the gradients of the global batch, not each worker's part of them.

    Keras 3 (3.15.1, optimizers/base_optimizer.py and backend/tensorflow/optimizer.py) clips before it sums gradients
    over the replicas, so that clipnorm, clipvalue and global_clipnorm mean something else on several workers.
    """
    reduce = keras.optimizers.Optimizer._all_reduce_sum_gradients

    def clip_sum(clip: Any) -> Any:
        def clipped(optimizer: Any, grads: list[Any]) -> Any:
            if not (optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm):
                return clip(optimizer, grads)
            optimizer.__dict__["_dbx_tf_is_reduced"] = True
            return clip(optimizer, [grad for grad, _ in reduce(optimizer, [(grad, None) for grad in grads])])

        return clipped

    def reduce_once(_: Any) -> Any:
        def reduced(optimizer: Any, grads_and_vars: list[Any]) -> Any:
            is_reduced = optimizer.__dict__.pop("_dbx_tf_is_reduced", False)
            return grads_and_vars if is_reduced else reduce(optimizer, grads_and_vars)

        return reduced

    with replaced(keras.optimizers.Optimizer, _clip_gradients=clip_sum, _all_reduce_sum_gradients=reduce_once):
        yield


@contextmanager
def random_numbers_per_replica(keras: Any, tell: Callable[[str], None]) -> Iterator[None]:
    """Draw other random numbers on each replica.

    Keras 3 (3.15.1, random/seed_generator.py) keeps the same seed state on all of them: each half of a batch would be
    dropped out by the same mask.
    """
    tell_once = functools.cache(tell)

    def next_seed(_: Step, original: Any, *args: Any, **kwargs: Any) -> Any:
        tell_once(RANDOM_LAYERS)
        seed = original(*args, **kwargs)
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([replica * 1_000_003, replica])

    with replaced(keras.random.SeedGenerator, next=in_step(next_seed)):
        yield


@contextmanager
def normalized_without_rows(keras: Any) -> Iterator[None]:
    """Keep a replica that has no rows of a batch from making BatchNormalization's statistics NaN.

    Keras 3 (3.15.1, layers/normalization/batch_normalization.py) takes the mean of no rows; tf_keras leaves it out.
    """

    def moments(_: Step, original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
        values = original(layer, inputs, mask)
        if layer.synchronized:
            return values
        kept = (layer.moving_mean, layer.moving_variance)
        has_rows = tf.shape(inputs)[0] > 0
        return tuple(tf.where(has_rows, v, tf.cast(k.value, v.dtype)) for v, k in zip(values, kept, strict=True))

    with replaced(keras.layers.BatchNormalization, _moments=in_step(moments)):
        yield


@contextmanager
def added_losses_told(keras: Any, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell how the loss counts that a layer of the user's adds; keep an activity regularizer's a sum where it is one.

    Before 3.15 Keras 3 (layers/layer.py) adds the sum over the rows for it, later their mean, as tf_keras does.
    """
    tell_once = functools.cache(tell)
    probe = keras.layers.ActivityRegularization(l2=1.0, name="probe")
    probe(tf.ones((2, 1)))
    is_sum = float(probe.losses[0]) > 1

    def add(step: Step, original: Any, layer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))
        if not caller.startswith(("keras.", "tf_keras.")):
            tell_once(_ADDED_LOSS)
        elif is_sum:
            loss = step.unscale(loss)
        return original(layer, loss, *args, **kwargs)

    with replaced(keras.layers.Layer, add_loss=in_step(add)):
        yield


@contextmanager
def unscaled_losses_refused(keras: Any, apply_name: str) -> Iterator[None]:
    """Refuse a train_step that applies the gradients of a loss that nothing has scaled: n times the gradient.

    That is how TensorFlow means it: https://www.tensorflow.org/tutorials/distribute/custom_training
    """

    def apply(step: Step, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not step.is_scaled:
            raise ConfigError(_UNSCALED.format(name=step.owner, count=step.num_replicas))
        return original(*args, **kwargs)

    def average(step: Step, original: Any, *args: Any, **kwargs: Any) -> Any:
        step.is_scaled = True  # by the rows of the global batch
        return original(*args, **kwargs)

    optimizer = keras.optimizers.Optimizer
    with replaced(optimizer, **{apply_name: in_step(apply)}), replaced(tf.nn, compute_average_loss=in_step(average)):
        yield
