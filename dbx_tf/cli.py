"""The command `dbx-tf`.

Runs on: driver.
"""

from __future__ import annotations

import click


@click.group()
@click.version_option(package_name="dbx_tf")
def main() -> None:
    """Train Keras models on all servers of a Spark cluster."""


@main.command()
@click.option("--num-slots", default=2, show_default=True, help="Workers that train together.")
@click.option("--epochs", default=5, show_default=True, help="Passes over the data.")
def demo(num_slots: int, epochs: int) -> None:
    """Train a small network on handwritten digits, on two real workers of a local Spark."""
    from dbx_tf.demo import run_demo

    run_demo(num_slots, epochs)
