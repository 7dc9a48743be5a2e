"""A folder on the local disk, of a worker or of the driver's, that goes away with its process.

Runs on: workers, in the Spark task; driver.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PREFIX: Final = "dbx_tf-run-"
_LOCK: Final = ".lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that is removed in the end, also if this process is killed.

    A process that waits for that does it; if it was killed too, the next run on this host does.
    """
    import fcntl  # not on Windows, where `import dbx_tf` should work all the same

    _remove_abandoned()
    new = Path(tempfile.mkdtemp(prefix="dbx_tf-new-"))
    with (new / _LOCK).open("w") as lock:
        # Held until this process ends, however it does; process ids would not tell for containers that share a disk.
        # Only then does the folder get the name under which others look for abandoned ones.
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = new.rename(new.with_name(new.name.replace("dbx_tf-new-", _PREFIX)))
        try:
            with _removed_after_us(folder):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _removed_after_us(folder: Path) -> Iterator[None]:
    """Have a shell wait for the end of its input, which comes when this process ends, however it does."""
    command = ["sh", "-c", 'cat >/dev/null; rm -rf "$0"', str(folder)]
    # In a session of its own: a signal to this process's group is not for it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield


def _remove_abandoned() -> None:
    import fcntl

    for lock_file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock_file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            shutil.rmtree(lock_file.parent, ignore_errors=True)
