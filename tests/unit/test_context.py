"""get_context where no run is."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_get_context_in_plain_python_is_one_worker() -> None:
    """A train_fn can be called by itself, as in a unit test; its scratch folder is gone with the interpreter."""
    code = """
from dbx_tf import get_context
first, second = get_context(), get_context()
assert (first.worker_index, first.num_workers, first.num_replicas, first.is_chief) == (0, 1, 1, True)
assert first.per_replica_batch_size(7) == 7
first.log_metric("x", 1.0, 0)
assert first.scratch_dir == second.scratch_dir and first.scratch_dir.is_dir()
print(first.scratch_dir)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.splitlines()[-1]).exists()
