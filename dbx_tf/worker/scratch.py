"""The folder of a worker on its local disk.

Runs on: workers, in the Spark task.
"""

from __future__ import annotations

import contextlib
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
    import fcntl  # not on Windows, where `import dbx_tf` should work all the same

    _remove_abandoned()
    new = Path(tempfile.mkdtemp(prefix="dbx_tf-new-"))
    with (new / _LOCK).open("w") as lock:
        # Held until this process ends, however it does; process ids would not tell for containers that share a disk.
        # Only then does the folder get the name under which others look for abandoned ones.
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = new.rename(new.with_name(new.name.replace("dbx_tf-new-", _PREFIX)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    import fcntl

    for lock_file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock_file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            shutil.rmtree(lock_file.parent, ignore_errors=True)
