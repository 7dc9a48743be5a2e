"""Kinds of models, and training steps of users' own."""

from typing import Any

from .table import BATCH, case, compiled, crossentropy, data, network, result, train, weights_only


@case(three=True)
def sequential_unbuilt(keras: Any) -> Any:
    return train(keras, keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]))


@case("told", "the loss of each output is reported as the mean over the batches", legacy="equal")
def functional_with_dicts_last_batch(keras: Any) -> Any:
    return _functional(keras, 131)


@case()
def functional_with_dicts(keras: Any) -> Any:
    return _functional(keras, 192)


def _functional(keras: Any, rows: int) -> Any:
    x, y = data(rows)
    inputs = {"left": keras.Input((4,), name="left"), "right": keras.Input((4,), name="right")}
    hidden = keras.layers.Concatenate()([inputs["left"], inputs["right"]])
    outputs = {"label": keras.layers.Dense(2, name="label")(hidden), "mean": keras.layers.Dense(1, name="mean")(hidden)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"label": crossentropy(keras), "mean": "mse"}, metrics={"label": "accuracy"})
    given = {"left": x[:, :4], "right": x[:, 4:]}
    history = model.fit(given, {"label": y, "mean": x.mean(axis=1)}, epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history, predict=model.predict(given, batch_size=BATCH, verbose=0))


def _subclass(keras: Any, **members: Any) -> Any:
    class Net(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.out = keras.layers.Dense(2)
            self.tracker = keras.metrics.Mean(name="tracked")

        def call(self, inputs: Any) -> Any:
            return self.out(self.hidden(inputs))

    return type("Net", (Net,), members)()


@case()
def subclassed(keras: Any) -> Any:
    return train(keras, _subclass(keras))


def _applied(model: Any, tape: Any, loss: Any) -> None:
    variables = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def _fit_custom(keras: Any, train_step: Any, rows: int = 131) -> Any:
    """Fit with a train_step of one's own; evaluate as usual."""
    model = compiled(keras, _subclass(keras, train_step=train_step), metrics=None)
    history = model.fit(*data(rows), epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history, predict=model.predict(data(21)[0], verbose=0))


@case()
def train_step_with_compute_loss(keras: Any) -> Any:
    """As in Keras's guide: the scaled loss goes into the gradient, and into a Mean."""
    import tensorflow as tf

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        _applied(self, tape, loss)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}

    return _fit_custom(keras, train_step)


@case(legacy="absent")
def train_step_that_returns_its_loss(keras: Any) -> Any:
    import tensorflow as tf

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        _applied(self, tape, loss)
        return {"own": loss}

    return _fit_custom(keras, train_step)


@case()
def train_step_divided_by_replicas(keras: Any) -> Any:
    import tensorflow as tf

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses) / tf.distribute.get_strategy().num_replicas_in_sync
        _applied(self, tape, loss)
        self.tracker.update_state(losses)
        return {"tracked": self.tracker.result()}

    return _fit_custom(keras, train_step, rows=2 * BATCH)


@case("refused", "computes its own loss")
def train_step_with_a_plain_mean(keras: Any) -> Any:
    import tensorflow as tf

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses)
        _applied(self, tape, loss)
        return {"loss": loss}

    return _fit_custom(keras, train_step)


@case("refused", "the train_step of Net is a tf.function")
def train_step_in_a_function(keras: Any) -> Any:
    import tensorflow as tf

    def train_step(self: Any, batch: Any) -> Any:
        return super(type(self), self).train_step(batch)

    model = _subclass(keras, train_step=tf.function(train_step))
    model(data()[0])
    model = compiled(keras, model)
    model.optimizer.build(model.trainable_variables)
    return weights_only(model, history=model.fit(*data(), batch_size=BATCH, verbose=0).history)


@case(legacy="absent")
def compute_loss_in_a_function(keras: Any) -> Any:
    """A tf.function is traced once, and here used by two fits."""
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def loss(y_true: Any, y_pred: Any) -> Any:
        return crossentropy(keras)(y_true, y_pred)

    def compute_loss(
        self: Any, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
    ) -> Any:
        return loss(y, y_pred)

    model = compiled(keras, _subclass(keras, compute_loss=compute_loss))
    model.fit(*data(131), batch_size=BATCH, verbose=0)
    model.compile(keras.optimizers.SGD(0.05), metrics=["accuracy"])
    return result(model, model.fit(*data(131), batch_size=BATCH, verbose=0))


@case(legacy="absent")
def compute_loss_overridden(keras: Any) -> Any:
    import tensorflow as tf

    def compute_loss(
        self: Any, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
    ) -> Any:
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))

    return _fit_custom_loss(keras, compute_loss)


def _fit_custom_loss(keras: Any, compute_loss: Any) -> Any:
    model = compiled(keras, _subclass(keras, compute_loss=compute_loss))
    return result(model, model.fit(*data(131), epochs=2, batch_size=BATCH, verbose=0))


@case(legacy="absent")
def compute_loss_extended(keras: Any) -> Any:
    import tensorflow as tf

    def compute_loss(
        self: Any, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
    ) -> Any:
        loss = super(type(self), self).compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * tf.reduce_mean(tf.square(y_pred))

    return _fit_custom_loss(keras, compute_loss)


@case()
def two_optimizers_in_a_step(keras: Any) -> Any:
    import tensorflow as tf

    other = keras.optimizers.SGD(0.01, clipnorm=0.1)

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        for optimizer, layer in ((self.optimizer, self.hidden), (other, self.out)):
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(losses)
        return {"tracked": self.tracker.result()}

    model = _subclass(keras, train_step=train_step)
    model(data()[0])
    model.compile("sgd", crossentropy(keras))
    history = model.fit(*data(), epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history)


@case()
def custom_loop(keras: Any) -> Any:
    """A loop without fit, as TensorFlow's tutorial has it."""
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    model, optimizer = network(keras), keras.optimizers.SGD(0.1)
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def train_step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    losses = [float(train_step(x, y)) for x, y in strategy.experimental_distribute_dataset(batches)]
    return weights_only(model, losses=losses)


@case()
def two_models(keras: Any) -> Any:
    first = train(keras)
    return {"first": first, "second": train(keras, network(keras, keras.layers.Dense(4)), loss=crossentropy(keras))}
