"""The command `dbx-tf`.

Runs on: driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dbx_tf.errors import ClusterError, ConfigError, DbxTfError, TrackingError

if TYPE_CHECKING:
    from dbx_tf.job import Job

_FAILED: Final = 1
_BAD_SETUP: Final = 2  # also click's own, for a wrong option
_CANCELLED: Final = 3


def main() -> None:
    """Run the command; a training that worked returns, since Databricks takes any SystemExit for a failure."""
    try:
        code = commands(standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt, SystemExit):  # Ctrl-C, or SIGTERM during a run
        click.echo("cancelled", err=True)
        code = _CANCELLED
    except DbxTfError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        is_setup = isinstance(error, ConfigError | ClusterError) or (
            isinstance(error, TrackingError) and error.run_id is None
        )
        code = _BAD_SETUP if is_setup else _FAILED
    if code:
        sys.exit(code)


@click.group()
@click.version_option(package_name="dbx_tf")
def commands() -> None:
    """Train Keras models on all servers of a Spark cluster."""


@commands.command()
@click.option("--num-slots", default=2, show_default=True, help="Workers that train together.")
@click.option("--epochs", default=5, show_default=True, help="Passes over the data.")
def demo(num_slots: int, epochs: int) -> None:
    """Train a small network on handwritten digits, on two real workers of a local Spark."""
    from dbx_tf.demo import run_demo

    run_demo(num_slots, epochs)


def _job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.argument("train_fn", required=False),
        click.option(
            "--config", type=click.Path(path_type=Path), help="A YAML file: train_fn, runner, tracking, params."
        ),
        click.option("--num-slots", type=int, help="GPUs, or without GPUs Spark tasks, that train together."),
        click.option("--local-mode", is_flag=True, help="Train in processes of this machine, without Spark."),
        click.option("--require-hosts", metavar="N|all", help="Start only if the workers are on so many servers."),
        click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="An argument of train_fn."),
        click.option("--tracking-uri", help="MLflow's tracking server."),
        click.option("--experiment", help="MLflow experiment."),
        click.option("--run-name", help="Name of the MLflow run."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@commands.command()
@_job_options
def run(**options: Any) -> None:
    """Train TRAIN_FN, as package.module:function or path/to/file.py:function.

    Exit codes: 0 done, 1 failed in training, 2 bad set-up, 3 cancelled.
    """
    from dbx_tf.job import publish

    job, train_fn = _prepare(**options)
    result = job.make_runner().run(train_fn, **job.params)
    click.echo(str(result))
    if (reason := publish(result)) is not None:
        click.echo(f"dbx_tf: {reason}", err=True)


@commands.command()
@_job_options
@click.option("--probe", is_flag=True, help="Ask the workers themselves, in a short Spark job.")
def plan(*, probe: bool, **options: Any) -> int:
    """Print what `run` would do, and what stands in the way; exit code 2 if it would be refused."""
    job, train_fn = _prepare(**options)
    found = job.make_runner().plan(train_fn, probe=probe, **job.params)
    click.echo(str(found))
    return _BAD_SETUP if any(problem.level == "error" for problem in found.problems) else 0


def _prepare(
    *,
    train_fn: str | None,
    config: Path | None,
    num_slots: int | None,
    local_mode: bool,
    require_hosts: str | None,
    params: tuple[str, ...],
    **tracking: Any,
) -> tuple[Job, Callable[..., Any]]:
    """The job of a configuration file and of the options, which go before it, and its train_fn."""
    from dbx_tf.job import Job, find_train_fn, load_job, typed_params

    job = load_job(config) if config else Job()
    target = train_fn or job.train_fn
    if not target:
        raise click.UsageError("give TRAIN_FN, or train_fn in the --config file")
    wrong = [param for param in params if "=" not in param]
    if wrong:
        raise click.UsageError(f"--param {wrong[0]}: give it as name=value")
    function = find_train_fn(target)
    texts = dict(param.split("=", 1) for param in params)
    hosts = int(require_hosts) if require_hosts and require_hosts.isdigit() else require_hosts
    given = {"num_slots": num_slots, "local_mode": local_mode or None, "require_hosts": hosts}
    job = replace(
        job,
        runner={**job.runner, **{name: value for name, value in given.items() if value is not None}},
        tracking={**job.tracking, **{name: value for name, value in tracking.items() if value is not None}},
        params={**job.params, **typed_params(function, texts)},
    )
    return job, function
