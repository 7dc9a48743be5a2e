"""Looks around on every worker before a training: what is installed, what can be reached, what is free.

Runs on: workers, in the Spark task.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dbx_tf.cluster import join_address
from dbx_tf.errors import ClusterError
from dbx_tf.wire.channel import connect
from dbx_tf.wire.events import Role
from dbx_tf.worker import environment
from dbx_tf.worker.peers import find_unreachable
from dbx_tf.worker.task import Place, Program, held_port

_IMPORT: Final = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
_IMPORT_SECONDS: Final = 300.0
_CONNECT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found on one worker."""

    worker_index: int
    host: str
    executor: str
    versions: dict[str, str]
    place_error: str
    """Why Spark's task is no place for a worker; empty if it is."""
    tensorflow_error: str
    """Why TensorFlow can't be imported; empty if it can."""
    num_gpus: int
    """GPUs that TensorFlow sees (count)."""
    free_disk_bytes: int
    scratch_dir: str
    peer_error: str
    """Which other worker can't be reached; empty if all can."""
    driver_error: str
    """Why the driver can't be reached; empty if it can."""
    missing_paths: list[str]
    """Of the paths asked for, those that are not there."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Looks around in all barrier tasks at once."""

    program: Program
    """As for the training."""
    packages: tuple[str, ...]
    """Packages whose versions to tell, besides those of every training."""
    paths: tuple[str, ...]
    """Files and folders to look for."""

    def __call__(self) -> list[Finding]:
        """Look around in the barrier task that this is called in; returns what all of them found, in order."""
        from pyspark import BarrierTaskContext

        context: Any = BarrierTaskContext.get()
        place = self.program.find_place()
        try:
            with held_port(place.ip) as port:  # until all have tried to reach it
                addresses = context.allGather(join_address(place.ip, port))
                own = json.dumps(asdict(self.look(place, addresses)))
                return [Finding(**json.loads(text)) for text in context.allGather(own)]
        finally:
            environment.restore()

    def look(self, place: Place, addresses: Sequence[str] = ()) -> Finding:
        """Look around here; does not raise, since the others wait."""
        tensorflow_error, num_gpus = _import_tensorflow(self.program, place)
        scratch, free = _disk()
        return Finding(
            worker_index=place.worker_index,
            host=socket.gethostname(),
            executor=place.executor,
            versions=environment.package_versions(*self.packages),
            place_error=place.error,
            tensorflow_error=tensorflow_error,
            num_gpus=num_gpus,
            free_disk_bytes=free,
            scratch_dir=scratch,
            peer_error=find_unreachable(addresses, place.worker_index),
            driver_error=self._try_driver(place.worker_index),
            missing_paths=[path for path in self.paths if not _exists(path)],
        )

    def _try_driver(self, worker_index: int) -> str:
        try:
            connect(self.program.address, worker_index, Role.TASK, timeout_seconds=_CONNECT_SECONDS).close()
        except ClusterError as error:
            return str(error)
        return ""


def _disk() -> tuple[str, int]:
    """The folder for temporary files, and what is free there; without one, nothing is."""
    try:
        folder = tempfile.gettempdir()
        return folder, shutil.disk_usage(folder).free
    except OSError as error:
        return str(error), 0


def _exists(path: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(path).exists()
    return False


def _import_tensorflow(program: Program, place: Place) -> tuple[str, int]:
    """Import it in a process of its own: Spark's Python worker stays as it was."""
    env = environment.of_training(program.env, program.python_path, place.gpus)
    command = [sys.executable, "-P", "-c", _IMPORT]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {_IMPORT_SECONDS:g} seconds", 0
    except OSError as error:
        return str(error), 0
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return last, 0
    return "", int(done.stdout.split()[-1])
