"""Lets all workers save a model to one path: each file appears whole, whoever writes last.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def saved_whole(keras: Any, scratch_dir: Path, run_key: str) -> Iterator[None]:
    """Write what models save, also for ModelCheckpoint, on the local disk first, and then move it.

    The same train_fn runs on every worker, so all of them save to the same path at once; h5py (3.14) then fails on the
    file's lock and a zip file is mixed up. And /Volumes takes no random writes: a file has to be copied there whole.
    Paths of other file systems (`s3://`, `gs://`) are left to Keras.

    Args:
        keras: The module `keras` or `tf_keras`.
        scratch_dir: A folder of this worker's own.
        run_key: The same on all workers of a run, and on no others.
    """
    with ExitStack() as stack:
        for name in ("save", "save_weights", "export"):
            original = getattr(keras.Model, name)
            setattr(keras.Model, name, _staged(original, scratch_dir, run_key))
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


def _staged(original: Any, scratch_dir: Path, run_key: str) -> Any:
    num_saves: Counter[Path] = Counter()

    @functools.wraps(original)
    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        target = Path(filepath) if isinstance(filepath, str | Path) else None
        if target is None or "://" in str(filepath) or not kwargs.get("overwrite", True):
            return original(self, filepath, *args, **kwargs)
        num_saves[target] += 1
        with tempfile.TemporaryDirectory(dir=scratch_dir) as folder:
            # A thread is in no strategy's scope, where reading metrics and making variables waits for all workers.
            with ThreadPoolExecutor(1) as thread:
                staged = str(Path(folder, target.name))
                result = thread.submit(original, self, staged, *args, **kwargs).result()
            for path in Path(folder).iterdir():
                if path.is_dir():
                    _put_folder(path, target.parent / path.name, f".saved-{run_key}-{num_saves[target]}")
                else:
                    _put_file(path, target.parent / path.name)
            return result

    return save


def _put_file(source: Path, target: Path) -> None:
    """Copy next to the target and rename: a reader finds the old or the new, never a part."""
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    shutil.copyfile(source, beside)
    beside.replace(target)


def _put_folder(source: Path, target: Path, marker: str) -> None:
    """The same for a folder, which can't be replaced under a reader: what another worker has put there is left."""
    (source / marker).touch()
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    shutil.copytree(source, beside)
    try:
        if not (target / marker).exists():
            with contextlib.suppress(FileNotFoundError):
                old = beside.with_name(beside.name + ".old")
                target.rename(old)
                shutil.rmtree(old)
            beside.rename(target)
    except OSError:
        if not (target / marker).exists():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
