"""Runs cases one after another in one process, and leaves each one's outcome in a file."""

import inspect
import os
import pickle
from pathlib import Path
from typing import Any

from .table import CASES


def run_cases(folder: str, names: list[str], keras_name: str = "keras") -> None:
    """Run cases in this process, which may be a worker."""
    import importlib

    keras = importlib.import_module(keras_name)
    for name in names:
        run_case(keras, folder, name)


def run_case(keras: Any, folder: str, name: str) -> None:
    """Run one case."""
    from dbx_tf import get_context

    keras.utils.set_random_seed(1)
    os.environ["DBX_TF_CONFORMANCE_FOLDER"] = str(Path(folder, "shared", name))
    Path(folder, "shared", name).mkdir(parents=True, exist_ok=True)
    try:
        outcome: dict[str, Any] = CASES[name].run(keras)
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, f"{name}.{get_context().worker_index}.pkl").write_bytes(pickle.dumps(outcome))


FIXED = {
    "clipnorm": "clip",
    "global_clipnorm": "clip",
    "clipvalue": "clip",
    "clipping_with_loss_scaling": "clip",
    "loss_function_of_a_scalar": "losses",
    "loss_class_of_a_scalar": "losses",
    "compute_loss_overridden": "losses",
    "last_batch_uneven": "losses",
    "masked_sequences": "masks",
    "loss_mean_with_sample_weight": "masks",
    "train_step_with_compute_loss": "means",
    "metric_function_of_a_scalar": "means",
    "batch_normalization": "averages",
    "batch_normalization_without_rows": "moments",
    "dataset_of_unknown_length": "loop",
    "predictions_of_one_batch": "loop",
    "dataset_shuffled": "loop",
    "generator": "loop",
    "dropout_masks": "seeds",
}
"""Cases that Keras 3 gets wrong by itself, and the fix without which they are."""


def run_cases_without_fixes(folder: str, names: list[str]) -> None:
    """Run cases that need a fix, with Keras as it was before that fix; only inside a run."""
    import keras
    from keras.src.losses import loss

    from dbx_tf.worker import agreement

    owners: dict[str, list[tuple[Any, list[str]]]] = {
        "clip": [(keras.optimizers.Optimizer, ["_clip_gradients", "_all_reduce_sum_gradients"])],
        "losses": [
            (keras.Model, ["compute_loss", "_compute_loss"]),
            (loss, ["scale_loss_for_distribution", "unscale_loss_for_distribution", "reduce_values"]),
        ],
        "masks": [(loss, ["apply_mask", "reduce_values"])],
        "means": [(keras.metrics.Mean, ["update_state"])],
        "moments": [(keras.layers.BatchNormalization, ["_moments"])],
        "loop": [
            (keras.Model, ["make_train_function", "make_test_function", "predict_on_batch", "_maybe_symbolic_build"]),
        ],
        "seeds": [(keras.random.SeedGenerator, ["next"])],
    }
    for name in names:
        fix = FIXED[name]
        attributes = [(owner, attribute) for owner, attributes in owners.get(fix, []) for attribute in attributes]
        fixes = [(owner, attribute, getattr(owner, attribute)) for owner, attribute in attributes]
        averaging = agreement._averaging
        if fix == "averages":
            agreement._averaging = lambda strategy, variables: lambda: None
        for owner, attribute, function in fixes:
            setattr(owner, attribute, inspect.unwrap(function))
        run_case(keras, folder, name)
        for owner, attribute, function in fixes:
            setattr(owner, attribute, function)
        agreement._averaging = averaging
