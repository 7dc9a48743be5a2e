# Databricks notebook source
# MAGIC %md
# MAGIC # Register the model, load it, score a table with it
# MAGIC
# MAGIC The trained model gets a name in Unity Catalog and an alias. Other notebooks and jobs load it by these, and
# MAGIC score a DataFrame with it on all servers.
# MAGIC
# MAGIC `model_name` needs a catalog and a schema that are there, and the right to make models in it (`CREATE MODEL`).
# MAGIC Whether it can be used is found out before training starts.

# COMMAND ----------

# DBTITLE 1,Runtime 17.3 LTS ML brings an older Keras, runtime 19 ML no TensorFlow
# MAGIC %pip install --quiet dbx_tf "tensorflow>=2.19,<2.22" "keras>=3.10" "protobuf<7"

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

dbutils.widgets.text("num_slots", "2")
dbutils.widgets.text("model_name", "main.default.digits")
num_slots, model_name = int(dbutils.widgets.get("num_slots")), dbutils.widgets.get("model_name")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Train and register


# COMMAND ----------


def train_fn():
    import tensorflow as tf
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images, labels, epochs=5, batch_size=64, verbose=2)
    return model


# COMMAND ----------

from dbx_tf import Runner, Tracking

# The alias moves to the new version only when training has succeeded.
tracking = Tracking(registered_model_name=model_name, model_alias="champion")
run = Runner(num_slots=num_slots, tracking=tracking).run(train_fn)
run

# COMMAND ----------

# MAGIC %md
# MAGIC ## Load it as a Keras model

# COMMAND ----------

import mlflow

model = mlflow.keras.load_model(f"models:/{model_name}@champion")
model.summary()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Score a DataFrame on all servers
# MAGIC
# MAGIC A column of arrays holds an image for each row, nested or flat; a model of plain numbers takes a list of
# MAGIC columns, `features=["x1", "x2", "x3"]`.

# COMMAND ----------

import pandas as pd
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
table = pd.DataFrame({"digit": labels, "image": (images / 16.0).tolist()})
frame = spark.createDataFrame(table)

# COMMAND ----------

from pyspark.sql import functions

import dbx_tf

scored = dbx_tf.score(frame, f"models:/{model_name}@champion", features="image", output="probabilities")
guess = functions.expr("array_position(probabilities, array_max(probabilities)) - 1")
is_right = functions.expr("double(guess = digit)")
result = scored.withColumn("guess", guess).agg(functions.avg(is_right).alias("accuracy")).collect()
result
