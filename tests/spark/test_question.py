"""The question that this package answers, on two set-ups of Spark."""

from pathlib import Path

import pytest

from .conftest import run_script


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_all_three_kinds_of_code_train_on_both_workers(master: str, store: str, tmp_path: Path) -> None:
    """Plain Keras, the standard advice and the mistake: two workers, one model, and Spark as it was before."""
    answers = run_script("question.py", master, store, folder=tmp_path)
    for kind in ("plain", "multi_worker", "mirrored"):
        answer = answers[kind]
        assert (answer["workers"], answer["replicas"]) == (2, 2), kind
        assert len(set(answer["pids"])) == 2, kind
        assert len(set(answer["executors"])) == (2 if "cluster" in master else 1)
        assert len(answer["accuracy"]) == 5
        assert answer["accuracy"][-1] > 0.93, kind  # one process: 0.96 to 0.98
        assert answer["model_uri"]
        was_told = any("MirroredStrategy, which never leaves its server" in notice for notice in answer["notices"])
        assert was_told == (kind == "mirrored")
    assert any("on one host" in n and "same machine" in n for n in answers["plain"]["notices"]) == ("cluster" in master)
    assert answers["leaked"] == [{}, {}]
    assert "Number of devices: 2" in answers["output"]
