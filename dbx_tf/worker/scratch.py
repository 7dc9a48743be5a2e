"""The folder of a worker on its local disk.

Runs on: workers, in the Spark task.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PREFIX: Final = "dbx_tf-worker-"
_LOCK: Final = ".lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that is removed in the end, by the next worker on this host if this one is killed."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with (folder / _LOCK).open("w") as lock:
        # Held until this process ends, however it does; process ids would not tell for containers that share a disk.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    for lock_file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock_file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            shutil.rmtree(lock_file.parent, ignore_errors=True)
