"""Spark Connect where the workers can't reach the client: what they say comes with the result."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import connect_server, free_port, run_script, wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="making network namespaces needs root, and the command ip"
)

BRIDGE = """
import asyncio, sys

async def copy(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()

async def main(kind, port, path):
    async def join(reader, writer):
        inside = kind == "inside"
        other = await (asyncio.open_connection("127.0.0.1", port) if inside else asyncio.open_unix_connection(path))
        await asyncio.gather(copy(reader, other[1]), copy(other[0], writer), return_exceptions=True)
    if kind == "inside":
        server = await asyncio.start_unix_server(join, path)
    else:
        server = await asyncio.start_server(join, "127.0.0.1", port)
    await server.serve_forever()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
"""
"""Carries TCP connections into a network namespace, through a Unix socket."""


@contextlib.contextmanager
def bridge(log: Path, is_up: Callable[[], bool], *command: str) -> Iterator[None]:
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_until(is_up, process, log)
        yield
    finally:
        process.kill()
        process.wait(30)


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Spark Connect in a network of its own, from which nothing outside can be reached."""
    name, path, port = f"dbxtf{os.getpid()}c", tmp_path / "socket", free_port()
    inside = ("ip", "netns", "exec", name)
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=30)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True, timeout=30)
        with connect_server(tmp_path, "local[2]", *inside) as there, contextlib.ExitStack() as stack:
            far_port = there.rpartition(":")[2]
            carry = (sys.executable, "-c", BRIDGE)
            log = tmp_path / "inside.log"
            stack.enter_context(bridge(log, path.exists, *inside, *carry, "inside", far_port, str(path)))
            log = tmp_path / "outside.log"
            stack.enter_context(bridge(log, lambda: is_open(port), *carry, "outside", str(port), str(path)))
            yield f"sc://127.0.0.1:{port}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)


def test_all_comes_with_the_result(
    address: str, store: str, client: Any, tmp_path: Path, fresh_python: Callable[..., Any]
) -> None:
    """Weights, metrics, the model, user calls of MLflow and failures arrive, and the person is told why so late."""
    env = {"SPARK_CONNECT_MODE_ENABLED": "1"}
    answers = run_script("far.py", address, store, folder=tmp_path, env=env)
    alone = fresh_python("import train_fns\nvalue = train_fns.fit_and_return_weights()")
    assert answers["loss"] == pytest.approx(alone["history"]["loss"], abs=1e-5)
    for far, near in zip(answers["weights"], alone["weights"], strict=True):
        assert np.abs(np.array(far) - near).max() < 1e-5
    assert answers["topology"] == "2 workers on 1 host, 2 replicas in sync"
    assert answers["notices"][0].startswith("the workers can't reach this machine")
    run = client.get_run(answers["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["who"] == "0"
    assert run.data.tags["colour"] == "blue"
    assert run.data.metrics["mine"] == 7.0
    assert [m.value for m in client.get_metric_history(answers["run_id"], "loss")] == pytest.approx(answers["loss"])
    assert {a.path for a in client.list_artifacts(answers["run_id"], "notes")} == {"notes/hello.txt"}
    env = {"MLFLOW_TRACKING_URI": store}
    code = f"import mlflow\nvalue = mlflow.keras.load_model({answers['model_uri']!r}).get_weights()"
    for logged, trained in zip(fresh_python(code, env), answers["weights"], strict=True):
        assert np.abs(logged - np.array(trained, np.float32)).max() == 0.0
    worker_index, cause_type, log_tail, run_id = answers["failure"]
    assert (worker_index, cause_type) == (1, "ValueError")
    assert any("about to fail" in line for line in log_tail)
    assert client.get_run(run_id).info.status == "FAILED"
    assert answers["too_large"].startswith("ClusterError: train_fn and its arguments have 70 MB, but the workers can't")
