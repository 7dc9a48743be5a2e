"""Looks at each Keras fit before its first step: refuses what would train wrong, tells what would differ.

Runs on: workers, in the training process, on all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbx_tf.errors import ConfigError
from dbx_tf.worker import fit_data
from dbx_tf.worker.agreement import gathered
from dbx_tf.worker.export import is_legacy


def check_fit(model: Any, arguments: dict[str, Any], strategy: Any, tell: Callable[[str], None]) -> None:
    """Check a fit on several replicas.

    Args:
        model: The compiled model.
        arguments: What `fit` was called with, by name.
        strategy: The run's strategy.
        tell: Called with a plain sentence for what is only told.

    Raises:
        ConfigError: If this fit would fail in the middle, or train something else than on one machine.
    """
    validation = arguments["validation_data"]
    x = {"x": arguments["x"], "validation_data": validation[0] if isinstance(validation, tuple) else validation}
    for reason in (
        _refuse_model_settings(model),
        _refuse_optimizer_settings(model),
        *(_refuse_data(name, data) for name, data in x.items()),
        _refuse_uneven(arguments, strategy),
    ):
        if reason is not None:
            raise ConfigError(reason)
    for text in (*(_tell_sharding(data) for data in x.values()), _tell_losses_of_outputs(model, arguments)):
        if text is not None:
            tell(text)


def _refuse_model_settings(model: Any) -> str | None:
    if hasattr(model.train_step, "python_function"):
        return (
            f"the train_step of {type(model).__name__} is a tf.function; replicas can't add up their gradients inside "
            "of one; leave the decorator out, Keras makes a graph of the step anyway"
        )
    if getattr(model, "jit_compile", None) is True and not _has_gpu():
        return (
            "the model is compiled with jit_compile=True; XLA has no collectives for CPUs, so workers could not share "
            "gradients; leave it out of compile(), or train on GPUs"
        )
    return None


def _refuse_optimizer_settings(model: Any) -> str | None:
    if is_legacy(model):
        return None
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


def _refuse_data(name: str, x: Any) -> str | None:
    if _auto_shard_policy(x) == "OFF":
        return (
            f"{name} is a dataset with AutoShardPolicy.OFF; Keras still splits each of its batches over the replicas, "
            "so rows would be dropped; use AutoShardPolicy.DATA on the whole data, or shard by hand with "
            "strategy.distribute_datasets_from_function"
        )
    return None


def _refuse_uneven(arguments: dict[str, Any], strategy: Any) -> str | None:
    """Data that differ between the workers, such as those of a function: Keras takes the steps from each one's own."""
    values = [count for (count,) in gathered(strategy, [arguments["steps_per_epoch"] or _num_batches(arguments)])]
    if len(set(values)) == 1:
        return None
    batches = ", ".join(f"worker {index}: {count}" for index, count in enumerate(values))
    return (
        f"the workers' data have different numbers of batches ({batches}), so some would wait for others at the end; "
        "give all of them the same data and let dbx_tf split it, or repeat() it and give fit steps_per_epoch"
    )


def _num_batches(arguments: dict[str, Any]) -> int:
    """Batches of a fit's data on this worker (count); negative if they can't be told."""
    cardinality = getattr(arguments["x"], "cardinality", None)
    if cardinality is not None:
        return int(cardinality() if callable(cardinality) else cardinality)
    rows, size = fit_data.num_rows(arguments), fit_data.batch_size(arguments)
    return -1 if rows is None or not size else -(-rows // size)


def _tell_sharding(x: Any) -> str | None:
    policy = _auto_shard_policy(x)
    if policy not in ("FILE", "HINT"):
        return None
    return (
        f"with AutoShardPolicy.{policy} each worker reads its own part of the data, so batches are made of other rows "
        "than on one machine; AutoShardPolicy.DATA makes the same batches, and every worker reads all of the data"
    )


def _tell_losses_of_outputs(model: Any, arguments: dict[str, Any]) -> str | None:
    # Keras 3.15.1 weighs them by the size of the batch that its graph was traced with, see trainers/compile_utils.py.
    losses = getattr(getattr(model, "_compile_loss", None), "_user_loss", None)
    rows, size = fit_data.num_rows(arguments), fit_data.batch_size(arguments)
    if not isinstance(losses, dict | list | tuple) or (rows and size and rows % size == 0):
        return None
    return (
        "the loss of each output is reported as the mean over the batches; if the last batch is smaller, one machine's "
        "Keras weighs the first batch more than the others in it; the total loss and the weights are the same"
    )


def _auto_shard_policy(x: Any) -> str | None:
    """The name of a tf.data dataset's policy; None for anything else."""
    if not (hasattr(x, "options") and hasattr(x, "element_spec")):
        return None
    return str(x.options().experimental_distribute.auto_shard_policy.name)


def _has_gpu() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))
