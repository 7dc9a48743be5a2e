# Databricks notebook source
# MAGIC %md
# MAGIC # Why is only one of my two servers busy?
# MAGIC
# MAGIC Keras under `tf.distribute.MirroredStrategy` prints "Number of devices" and trains on one server: that strategy
# MAGIC mirrors a model over the devices of one machine and never leaves it. This notebook hands the same function to
# MAGIC `dbx_tf.Runner`, which starts it on every server, as one training.
# MAGIC
# MAGIC Attach it to a cluster of fixed size in *dedicated* access mode with an ML runtime. Its Spark config gives each
# MAGIC worker a whole server: `spark.task.cpus` (its cores) or `spark.task.resource.gpu.amount` (its GPUs).

# COMMAND ----------

# DBTITLE 1,Runtime 17.3 LTS ML brings an older Keras, runtime 19 ML no TensorFlow
# MAGIC %pip install --quiet dbx_tf "tensorflow>=2.19,<2.22" "keras>=3.10" "protobuf<7"

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

dbutils.widgets.text("num_slots", "2")
dbutils.widgets.text("epochs", "3")
num_slots, epochs = int(dbutils.widgets.get("num_slots")), int(dbutils.widgets.get("epochs"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The function from the question, unchanged


# COMMAND ----------


def train_fn(epochs=3):
    import tensorflow as tf
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)

    strategy = tf.distribute.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                tf.keras.layers.Conv2D(16, 3, activation="relu"),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(10),
            ]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    model.fit(images, labels, epochs=epochs, batch_size=64, validation_split=0.1, verbose=2)  # 64 over all servers
    return model


# COMMAND ----------

# MAGIC %md
# MAGIC ## What would run where

# COMMAND ----------

from dbx_tf import Runner

runner = Runner(num_slots=num_slots)
print(runner.plan(train_fn, epochs=epochs))

# COMMAND ----------

# MAGIC %md
# MAGIC ## All servers train

# COMMAND ----------

result = runner.run(train_fn, epochs=epochs)
result

# COMMAND ----------

for worker in result.topology.workers:
    print(worker.worker_index, worker.host, worker.pid, worker.devices)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The model is in MLflow

# COMMAND ----------

import mlflow

model = mlflow.keras.load_model(result.model_uri)
model.summary()
