"""What the tests with real processes share: one local Spark, one MLflow store, and a watch over what is left behind."""

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_tf import Tracking

HERE = Path(__file__).parent
CLASSIC = pytest.mark.parametrize("spark", ["classic"], indirect=True)
"""Mark of a test in which the way to Spark has no part."""
CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"
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


@pytest.fixture(scope="session", params=["classic", "connect"])
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A local Spark with three slots, each a Python worker process of its own; classic, and over Spark Connect."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    folder = tmp_path_factory.mktemp("warehouse")
    with (_classic if request.param == "classic" else _connect)(folder) as session:
        yield session


@contextlib.contextmanager
def _classic(folder: Path) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[3]").appName("dbx_tf tests").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.warehouse.dir", str(folder)).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@contextlib.contextmanager
def _connect(folder: Path) -> Iterator[Any]:
    with connect_server(folder, "local[3]") as address, _connect_mode():
        from pyspark.sql import SparkSession

        session = SparkSession.builder.remote(address).getOrCreate()
        os.environ.pop(CONNECT_MODE)  # tests that use this session set it again, others must not see it
        yield session
        session.stop()


@contextlib.contextmanager
def _connect_mode() -> Iterator[None]:
    """In this context, and no longer, pyspark is a client of Spark Connect."""
    before = dict(os.environ)
    os.environ[CONNECT_MODE] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_until(is_up: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for what a process has to do first; if it does not, show its log."""
    deadline = time.monotonic() + 240
    while not is_up():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


@contextlib.contextmanager
def connect_server(folder: Path, master: str, *prefix: str, conf: dict[str, str] | None = None) -> Iterator[str]:
    """A Spark Connect server in a process of its own, started with `prefix` before its command; yields its address."""
    port = free_port()
    settings = {"spark.connect.grpc.binding.port": str(port), "spark.ui.enabled": "false", **(conf or {})}
    settings |= {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.sql.warehouse.dir": str(folder)}
    home = spark_home(folder)
    command = [*prefix, str(home / "bin" / "spark-submit"), "--master", master]
    command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    log = folder / "connect.log"
    with log.open("w") as file:
        env = {**os.environ, "SPARK_HOME": str(home)}
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_until(lambda: "Spark Connect server started" in log.read_text(), process, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def spark_home(folder: Path) -> Path:
    """A SPARK_HOME of links: local-cluster writes into it, which must not be the installed package."""
    import pyspark

    home = folder / "spark_home"
    if home.exists():
        return home
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


def run_script(script: str, *args: str, folder: Path, timeout: float = 280, env: dict[str, str] | None = None) -> Any:
    """Run a script that starts a Spark of its own, and return the answers it writes."""
    out = folder / "answers.json"
    full = {**os.environ, "SPARK_HOME": str(spark_home(folder)), "SPARK_LOCAL_IP": "127.0.0.1"}
    full.pop("MLFLOW_TRACKING_URI", None)  # where other tests have set it
    full |= env or {}
    command = [sys.executable, str(HERE / script), *args, str(out)]
    done = subprocess.run(command, cwd=folder, env=full, capture_output=True, text=True, timeout=timeout, check=False)
    said = re.sub(r"(?m)^(\tat |\S+ \S+ (ERROR|WARN|INFO) |java\.).*\n", "", done.stderr)  # what the JVM says
    assert done.returncode == 0, done.stdout[-3000:] + said[-5000:]
    return {**json.loads(out.read_text()), "output": done.stdout}


@pytest.fixture(autouse=True)
def spark_is_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used Spark, all its slots are free and its Python workers are as they were."""
    if "spark" not in request.fixturenames:
        yield
        return
    session = request.getfixturevalue("spark")

    def environment(batches: Any) -> Iterator[Any]:  # not of this module, which workers must not import
        import pyarrow as pa

        for _ in batches:
            pass
        found = " ".join(str(os.environ.get(name)) for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES"))
        yield pa.RecordBatch.from_pydict({"variables": [found]})

    with _connect_mode() if "connect" in type(session).__module__ else contextlib.nullcontext():
        yield
        # Barrier tasks start together or not at all, so all slots are free.
        frame = session.range(0, 3, 1, 3).mapInArrow(environment, "variables string", barrier=True)
        assert [row.variables for row in frame.collect()] == ["None None"] * 3


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow database for all tests: making its tables takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    os.chdir(folder)
    return f"sqlite:///{folder / 'mlflow.db'}"


@contextlib.contextmanager
def mlflow_server(folder: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """A real MLflow server over HTTP; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", *options]
    full = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **(env or {})}
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=full, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(f"{address}/health"), process, log)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()  # noqa: S310  # our own server
    except OSError as error:
        return getattr(error, "code", 0) == 401  # it wants a password
    return True


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
