"""`dbx-tf run` from the built wheel, on a cluster whose servers have the wheel but not the driver's folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import spark_home
from .standalone import Cluster, standalone

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
TRAIN = """
import keras, numpy as np
from {helper} import scale

def train_fn(folder: str, epochs: int = 1):
    import os
    x = np.random.RandomState(0).rand(64, 4).astype("float32") * scale()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x.sum(axis=1), epochs=epochs, batch_size=16, verbose=0)
    print("the worker sees", os.listdir(folder), flush=True)
"""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("unshare"), reason="hiding a folder from a process needs root and unshare"
    ),
]


def environment(folder: Path) -> Path:
    """A Python environment with the packages of this one, all but dbx_tf; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    found = subprocess.run([python, "-P", "-c", "import dbx_tf"], capture_output=True, timeout=60, check=False)
    assert b"No module named 'dbx_tf'" in found.stderr
    return python


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without dbx_tf."""
    return environment(tmp_path_factory.mktemp("without") / "env")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has dbx_tf and a package of the user's, both from wheels."""
    folder = tmp_path_factory.mktemp("with")
    package = folder / "source" / "digits_job"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(TRAIN.format(helper="digits_job.data"))
    (package / "data.py").write_text("def scale():\n    return 2.0\n")
    (package.parent / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "digits-job"\nversion = "1"\n'
    )
    for source in (ROOT, package.parent):
        build = [sys.executable, "-m", "build", "--quiet", "--wheel", "--outdir", str(folder / "dist"), str(source)]
        subprocess.run(build, check=True, timeout=240)
    python = environment(folder / "env")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, *(folder / "dist").glob("*.whl")], check=True, timeout=120)
    return python


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the driver's, as in a workspace, with a train_fn and its neighbours."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN.format(helper="neighbour"))
    (folder / "neighbour.py").write_text("def scale():\n    return 2.0\n")
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Iterator[Cluster]:
    """A server with two cores, to which the driver's folder is empty."""
    folder = tmp_path_factory.mktemp("standalone") / "cluster"
    with standalone(folder, HOST) as cluster:
        cluster.start_worker("server", HOST, 2, ["unshare", "--mount"], f"mount -t tmpfs none {project}")
        cluster.wait_for_workers(1)
        yield cluster


def run(
    python: Path, target: str, *, project: Path, cluster: Cluster, workers_python: Path
) -> "subprocess.CompletedProcess[str]":
    """Run a train_fn with the installed command, from the project's folder."""
    conf = {"spark.ui.enabled": "false", "spark.driver.host": HOST, "spark.executor.memory": "1g"}
    settings = " ".join(f"--conf {name}={value}" for name, value in conf.items())
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {
        "PYSPARK_SUBMIT_ARGS": f"--master {cluster.master} {settings} pyspark-shell",
        "PYSPARK_PYTHON": str(workers_python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "SPARK_HOME": str(spark_home(cluster.folder)),
        "SPARK_LOCAL_IP": HOST,
        "MLFLOW_TRACKING_URI": f"sqlite:///{project}/mlflow.db",
    }
    command = [str(python.with_name("dbx-tf")), "run", target, "--num-slots", "2", "--param", "epochs=2"]
    command += ["--param", f"folder={project}"]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("target", ["digits_job.train:train_fn", "train:train_fn", "train.py:train_fn"])
def test_a_train_fn_is_found_wherever_it_lies(python: Path, project: Path, cluster: Cluster, target: str) -> None:
    """In an installed package, in a module beside, and in a file: workers need the driver's folder for none."""
    done = run(python, target, project=project, cluster=cluster, workers_python=python)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "the worker sees []" in done.stdout + done.stderr
    assert "2 workers on 1 host, 2 replicas in sync" in done.stdout


def test_workers_without_dbx_tf_are_told(python: Path, empty_python: Path, project: Path, cluster: Cluster) -> None:
    """What is missing and where to install it, not Spark's error."""
    done = run(python, "train:train_fn", project=project, cluster=cluster, workers_python=empty_python)
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ClusterError: the workers' Python has no package dbx_tf: install dbx-tf on every server" in done.stderr
