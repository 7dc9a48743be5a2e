"""Runs the case of a report in one process, and in two under MultiWorkerMirroredStrategy.

Usage: python two_workers.py <report>.md
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

PRELUDE = """
import keras, numpy as np, tensorflow as tf

class Strategy(tf.distribute.MultiWorkerMirroredStrategy):  # see fit-fails.md
    def reduce(self, op, value, axis=None):
        if isinstance(value, (dict, list, tuple)):
            return tf.nest.map_structure(lambda v: self.experimental_local_results(v)[0], value)
        if axis is not None and self.experimental_local_results(value)[0].shape.rank == 0:
            axis = None
        return super().reduce(op, value, axis)

def main(strategy_class):
    strategy = strategy_class()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return case()
"""


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(code: str, workers: list[str], index: int) -> "subprocess.Popen[str]":
    """Start one process, as a worker if there are any."""
    strategy = "Strategy" if "STOCK" not in code else "tf.distribute.MultiWorkerMirroredStrategy"
    strategy = strategy if workers else "tf.distribute.get_strategy"
    end = f"print('RESULT', main({strategy}), flush=True)\nimport os; os._exit(0)"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if workers:
        env["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
    command = [sys.executable, "-c", f"{PRELUDE}\n{code}\n{end}"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main(report: str) -> None:
    """Print what the case of a report returns, alone and on each of two workers."""
    match = re.search(r"```python\n(.*?)```", Path(report).read_text(), re.DOTALL)
    assert match is not None, "the report has no case"
    code, workers = match[1], [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = {"one process": run(code, [], 0)}
    processes["one process"].wait(timeout=120)
    processes |= {f"worker {index}": run(code, workers, index) for index in range(2)}
    for name, process in processes.items():
        try:
            out, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = "", "Error: it does not end"
        lines = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT")]
        errors = [line for line in err.splitlines() if "Error: " in line] or ["no result and no error"]
        print(f"{name}: {lines[0] if lines else errors[-1][:300]}")


if __name__ == "__main__":
    main(sys.argv[1])
