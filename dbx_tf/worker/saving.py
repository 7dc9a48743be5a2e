"""Lets all workers save a model to one path: each file appears whole, whoever writes last.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def saved_whole(keras: Any, scratch_dir: Path) -> Iterator[None]:
    """Write what models save, also for ModelCheckpoint, on the local disk first, and then move it.

    The same train_fn runs on every worker, so all of them save to the same path at once; h5py (3.14) then fails on the
    file's lock and a zip file is mixed up. And /Volumes takes no random writes: a file has to be copied there whole.
    Paths of other file systems (`s3://`, `gs://`) are left to Keras.
    """
    with ExitStack() as stack:
        for name in ("save", "save_weights", "export"):
            original = getattr(keras.Model, name)
            setattr(keras.Model, name, _staged(original, scratch_dir))
            stack.callback(setattr, keras.Model, name, original)
        if keras.__name__ == "keras":
            # Keras looks whether a folder is there before it makes it: another worker may come in between.
            from keras.src.utils import file_utils

            stack.callback(setattr, file_utils, "makedirs", file_utils.makedirs)
            file_utils.makedirs = functools.partial(_make_folder, file_utils.makedirs)
        yield


def _make_folder(original: Any, path: Any) -> None:
    with contextlib.suppress(FileExistsError):
        original(path)


def _staged(original: Any, scratch_dir: Path) -> Any:
    @functools.wraps(original)
    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        target = Path(filepath) if isinstance(filepath, str | Path) else None
        if target is None or "://" in str(filepath) or not kwargs.get("overwrite", True):
            return original(self, filepath, *args, **kwargs)
        with tempfile.TemporaryDirectory(dir=scratch_dir) as folder:
            staged = str(Path(folder, target.name))
            if original.__name__ == "export":
                # In a thread there is no strategy's scope, in which new variables wait for all workers.
                with ThreadPoolExecutor(1) as thread:
                    result = thread.submit(original, self, staged, *args, **kwargs).result()
            else:
                result = original(self, staged, *args, **kwargs)
            for path in Path(folder).iterdir():
                _put(path, target.parent / path.name)
            return result

    return save


def _put(source: Path, target: Path) -> None:
    """Copy next to the target and rename: a reader finds the old or the new, never a part."""
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    if source.is_dir():
        shutil.copytree(source, beside)
        with contextlib.suppress(FileNotFoundError):
            old = beside.with_name(beside.name + ".old")
            target.rename(old)
            shutil.rmtree(old)
    else:
        shutil.copyfile(source, beside)
    try:
        beside.replace(target)
    except OSError:
        if not source.is_dir():
            raise
        shutil.rmtree(beside)  # another worker has put the same folder there meanwhile
