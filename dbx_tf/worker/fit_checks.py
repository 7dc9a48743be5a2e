"""Looks at each Keras fit before its first step: refuses what would train wrong, tells what would differ.

Runs on: workers, in the training process, on all of them alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dbx_tf.errors import ConfigError
from dbx_tf.worker import fit_data


def check_fit(
    keras: Any, model: Any, arguments: dict[str, Any], num_replicas: int, tell: Callable[[str], None]
) -> None:
    """Check a fit of Keras 3 on several replicas.

    Args:
        keras: The module `keras`.
        model: The compiled model.
        arguments: What `fit` was called with, by name.
        num_replicas: Model copies over all workers (count).
        tell: Called with a plain sentence for what is only told.

    Raises:
        ConfigError: If this fit would fail in the middle, or train something else than on one machine.
    """
    for refuse in (_refuse_model_settings, _refuse_optimizer_settings):
        if (reason := refuse(model)) is not None:
            raise ConfigError(reason)
    if (reason := _refuse_data(keras, arguments["x"])) is not None:
        raise ConfigError(reason)
    if (text := _uneven_batch(arguments, num_replicas)) is not None:
        tell(text)


def _refuse_model_settings(model: Any) -> str | None:
    # Keras 3.15.1 puts collectives into a tf.cond inside of a tf.while_loop, which TensorFlow 2.21 can't run.
    if getattr(model, "steps_per_execution", 1) != 1:
        return (
            f"the model is compiled with steps_per_execution={model.steps_per_execution}; on several workers Keras can "
            "only run one step at a time; leave it out of compile()"
        )
    if getattr(model, "jit_compile", None) is True and not _has_gpu():
        return (
            "the model is compiled with jit_compile=True; XLA has no collectives for CPUs, so workers could not share "
            "gradients; leave it out of compile(), or train on GPUs"
        )
    return None


def _refuse_optimizer_settings(model: Any) -> str | None:
    optimizer: Any = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    settings = {"gradient_accumulation_steps": "a larger batch_size"}
    if getattr(optimizer, "use_ema", False):
        settings["ema_overwrite_frequency"] = "keras.callbacks.SwapEMAWeights"
    # Both make Keras 3.15.1 update variables inside of a tf.cond: "merge_call called while defining a new graph".
    for name, instead in settings.items():
        if value := getattr(optimizer, name, None):
            return (
                f"the optimizer has {name}={value}; Keras can't do that on several workers; "
                f"leave it out and use {instead} instead"
            )
    return None


def _refuse_data(keras: Any, x: Any) -> str | None:
    if inspect.isgenerator(x):
        return (
            "x is a Python generator; Keras reads its first batch to build the model and can't go back, and every "
            "worker would read all of it; use keras.utils.PyDataset or tf.data.Dataset.from_generator"
        )
    if hasattr(x, "options") and hasattr(x, "element_spec"):
        policy = x.options().experimental_distribute.auto_shard_policy
        if policy.name == "OFF":
            return (
                "x is a dataset with AutoShardPolicy.OFF; Keras still splits each of its batches over the replicas, so "
                "rows would be dropped; use AutoShardPolicy.DATA on the whole data, or shard by hand with "
                "strategy.distribute_datasets_from_function"
            )
    return None


def _uneven_batch(arguments: dict[str, Any], num_replicas: int) -> str | None:
    """Arrays whose batches can't be split evenly: TensorFlow gives each replica's mean the same weight."""
    num_rows, batch_size = fit_data.num_rows(arguments), fit_data.batch_size(arguments)
    if num_rows is None or batch_size is None:
        return None
    sizes = {min(batch_size, num_rows), num_rows % batch_size} - {0}
    uneven = [size for size in sizes if size % num_replicas]
    if not uneven:
        return None
    return (
        f"{num_rows} rows in batches of {batch_size} leave a batch of {uneven[0]}, which {num_replicas} replicas can't "
        "share evenly; its rows count a little more or less than on one machine; the results are the same as there "
        f"when batch_size and the number of rows divide by {num_replicas}"
    )


def _has_gpu() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))
