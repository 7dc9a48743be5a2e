"""Saving in the middle of train_fn, on all workers and on the chief only."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .callbacks import shared
from .table import BATCH, case, compiled, data, result


def _fit_and(keras: Any, save: Any) -> Any:
    """Fit, save, fit on, and return what was saved too."""
    model = compiled(keras)
    model.fit(*data(131), batch_size=BATCH, verbose=0)
    loaded = save(model)
    return result(model, model.fit(*data(131), batch_size=BATCH, verbose=0), loaded=loaded)


@case(three=True)
def save_on_all(keras: Any) -> Any:
    def save(model: Any) -> Any:
        model.save(shared("all.keras"))
        return keras.models.load_model(shared("all.keras")).get_weights()

    return _fit_and(keras, save)


@case()
def save_weights_on_all(keras: Any) -> Any:
    def save(model: Any) -> Any:
        model.save_weights(shared("all.weights.h5"))
        again = keras.models.clone_model(model)
        again.load_weights(shared("all.weights.h5"))
        return again.get_weights()

    return _fit_and(keras, save)


@case(legacy="absent")
def export_on_all(keras: Any) -> Any:
    import tensorflow as tf

    def save(model: Any) -> Any:
        model.export(shared("exported"), verbose=False)
        # Loaded in a strategy's scope, its variables would be mirrored ones.
        with ThreadPoolExecutor(1) as thread:
            loaded = thread.submit(tf.saved_model.load, shared("exported")).result()
        return loaded.serve(data(5)[0]).numpy()

    return _fit_and(keras, save)


@case(legacy="absent")
def save_on_the_chief(keras: Any) -> Any:
    from dbx_tf import get_context

    def save(model: Any) -> Any:
        if get_context().is_chief:
            model.save(shared("chief.keras"))
            model.save_weights(shared("chief.weights.h5"))
            model.export(shared("chief-exported"), verbose=False)
        return 0

    return _fit_and(keras, save)
