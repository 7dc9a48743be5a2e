"""Asks the workers themselves what a training would meet on them, and judges it.

Runs on: driver.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from dbx_tf.cluster import SlotLayout
from dbx_tf.driver.launch import Launcher
from dbx_tf.driver.reading import Used
from dbx_tf.errors import ArgumentProblem, ClusterError, Problem
from dbx_tf.wire.channel import Listener
from dbx_tf.worker.environment import version_differences
from dbx_tf.worker.probe import Finding, Probe
from dbx_tf.worker.task import Program

OTHER_PACKAGES: Final = ("protobuf",)
"""Not TensorFlow's own, but where their versions differ it may fail to import, or to read what others wrote."""
_MIN_FREE_BYTES: Final = 2 << 30
_INSTALL: Final = "install the same packages on all servers, as libraries of the cluster, or in the notebook by %pip"


def ask(
    launcher: Launcher, layout: SlotLayout, gpu_resource_name: str, env: Mapping[str, str], used: Used, seconds: float
) -> list[Finding]:
    """Run the probe on as many workers as the training would have.

    Raises:
        ClusterError: If the workers do not answer in time, or their job fails.
    """
    listener = Listener(launcher.bind_host, layout.num_tasks, lambda *_: None, lambda *_: None)
    program = Program(
        address=replace(listener.address, host=launcher.host),
        num_workers=layout.num_tasks,
        gpus_per_worker=layout.gpus_per_task,
        gpu_resource_name=gpu_resource_name,
        env=dict(env),
        python_path=tuple(str(Path(entry).resolve()) for entry in sys.path),
        seed=0,
        export_model=False,
        mlflow_addresses=(),
        echo=False,
    )
    paths = [text for text, where in used.texts.items() if where.startswith("argument ") and _is_here(text)]
    try:
        return launcher.collect(Probe(program, OTHER_PACKAGES, tuple(paths)), seconds)
    finally:
        listener.close()


def _is_here(text: str) -> bool:
    try:
        return Path(text).is_absolute() and Path(text).exists()
    except OSError:  # no path at all, such as a text that is too long
        return False


def judge(
    findings: Sequence[Finding], driver_versions: Mapping[str, str], gpus_per_worker: int, num_hosts_required: int
) -> Iterator[Problem]:
    """What stands in the way of a training, of all that was found."""
    for finding in findings:
        where = f"worker {finding.worker_index} on host {finding.host}"
        yield from _judge_packages(finding, where, driver_versions)
        if finding.place_error:
            fix = "look into the cluster's GPU settings"
            yield Problem("error", f"{where}: {finding.place_error}", "a worker has its GPUs to itself", fix)
        elif finding.num_gpus != gpus_per_worker and not finding.tensorflow_error:
            what = f"TensorFlow sees {finding.num_gpus} GPUs on {where}, not the {gpus_per_worker} of its task"
            fix = "install tensorflow[and-cuda] of the driver's version there, and look whether nvidia-smi works"
            yield Problem("error", what, "it needs a build for GPUs and NVIDIA's driver", fix)
        if finding.peer_error:
            what, _, fix = finding.peer_error.rpartition("; ")
            yield Problem("error", *what.partition("; ")[::2], fix)
        if finding.driver_error:
            possible = "without it, what workers say comes when training has ended (Spark Connect), or not at all"
            fix = "open the driver's ports to the servers, or run this on the cluster"
            yield Problem("warning", f"{where} can't reach the driver ({finding.driver_error})", possible, fix)
        if finding.free_disk_bytes < _MIN_FREE_BYTES:
            what = f"{where} has {finding.free_disk_bytes / (1 << 30):.1f} GiB free in {finding.scratch_dir}"
            fix = "free some, or have TMPDIR name a larger disk"
            yield Problem("warning", what, "the model and the checkpoints are staged there", fix)
        for path in finding.missing_paths:
            possible, fix = "only the driver does", "write it to a place that all servers see, such as /Volumes/..."
            yield ArgumentProblem("error", f"{where} does not see {path}", possible, fix)
    num_hosts = len({finding.host for finding in findings})
    if num_hosts < num_hosts_required:
        what = f"the workers landed on {num_hosts} host{'s' * (num_hosts > 1)}"
        fix = "set spark.task.cpus to the cores of a server, so that each takes one worker"
        yield Problem("error", what, f"require_hosts={num_hosts_required}", fix)


def _judge_packages(finding: Finding, where: str, driver_versions: Mapping[str, str]) -> Iterator[Problem]:
    if different := version_differences(finding.versions, driver_versions):
        yield Problem(
            "error", f"{where} has {different}, as the driver has it", "driver and workers need the same", _INSTALL
        )
    if finding.tensorflow_error:
        what = f"{where} can't import TensorFlow ({finding.tensorflow_error})"
        yield Problem("error", what, "every worker trains with it", _INSTALL)


def refusal(error: ClusterError) -> Problem:
    """What to say when the workers could not be asked."""
    fix = "look whether other jobs hold the slots, and into the executors' logs"
    return Problem("error", f"the workers could not be asked ({error})", "a training would not start either", fix)
