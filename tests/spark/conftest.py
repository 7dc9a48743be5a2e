"""What the tests with real processes share: one local Spark, one MLflow store, and a watch over what is left behind."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_tf import Tracking

HERE = Path(__file__).parent
SESSION = f"DBX_TF_TEST_SESSION={os.getpid()}"
os.environ["DBX_TF_TEST_SESSION"] = str(os.getpid())  # inherited by all that these tests start, to find it again
tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="dbx_tf_tests-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder start processes that train."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


def training_processes() -> list[int]:
    """Process ids of all training processes of this test session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_ours = SESSION.encode() in entry.with_name("environ").read_bytes().split(b"\0")
            if is_ours and b"dbx_tf.worker.process" in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue  # it has just ended
    return found


def pytest_unconfigure() -> None:
    """Remove the session's own folder for temporary files."""
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test, no training process is alive and no scratch folder is there."""
    before = set(scratch_folders())
    yield
    deadline = time.monotonic() + 10
    while (
        left := training_processes() + [f for f in scratch_folders() if f not in before]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def scratch_folders() -> list[Any]:
    """Folders that runs have made for themselves."""
    return list(Path(tempfile.gettempdir()).glob("dbx_tf-*"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A local Spark with three slots, each a Python worker process of its own."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[3]").appName("dbx_tf tests").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse"))).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def spark_is_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used Spark, all its slots are free and its Python workers are as they were."""
    yield
    if "spark" in request.fixturenames:
        context = request.getfixturevalue("spark").sparkContext
        seen = context.parallelize(range(3), 3).map(
            lambda _: [os.environ.get(n) for n in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES")]
        )
        assert seen.collect() == [[None, None]] * 3
        deadline = time.monotonic() + 10  # Spark's own listeners are told of a job's end a little later
        while context.statusTracker().getActiveJobsIds() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not context.statusTracker().getActiveJobsIds()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow database for all tests: making its tables takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    os.chdir(folder)
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture
def tracking(store: str) -> Tracking:
    """Log to the tests' own store."""
    return Tracking(tracking_uri=store)


@pytest.fixture
def client(store: str) -> Iterator[Any]:
    """An MLflow client of the tests' own store."""
    import mlflow

    mlflow.set_tracking_uri(store)  # MLflow 3.0 reads artifacts from there, whatever the client's own store is
    yield mlflow.MlflowClient(store)
    mlflow.set_tracking_uri(None)


@pytest.fixture
def fresh_python(tmp_path: Path) -> Callable[..., Any]:
    """Run a function of tests/spark/train_fns.py, or any code, in an interpreter of its own without dbx_tf."""

    def run(code: str, env: dict[str, str] | None = None, timeout: float = 240) -> Any:
        out = tmp_path / f"out-{time.monotonic_ns()}.pkl"
        begin = f"import pickle, sys\nsys.path.insert(0, {str(HERE)!r})\n"
        script = f"{begin}{code}\npickle.dump(value, open({str(out)!r}, 'wb'))\n"
        full = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **(env or {})}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=full,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return pickle.loads(out.read_bytes())

    return run
