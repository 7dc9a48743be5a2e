"""Secrets are masked in what a run shows."""

import pytest

from dbx_tf.driver.secrets import Secrets
from dbx_tf.wire.events import Failed, LogLines


def test_values_of_secret_names_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """From arguments, nested too, and from the environment as it is at the time; short values are left."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    secrets = Secrets({"password": "correct horse", "store": {"api_key": "battery staple"}, "name": "a long value"})
    text = "correct horse, battery staple, a long value, false, dapi-renewed"
    assert secrets.mask(text) == "***, ***, a long value, false, dapi-renewed"
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-renewed")
    assert secrets.mask(text) == "***, ***, a long value, false, ***"
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-again")
    assert "dapi-renewed" not in secrets.mask(text)


def test_what_workers_say_is_masked() -> None:
    """Lines stay lines, also empty ones, and other fields stay what they are."""
    secrets = Secrets({"token": "a-secret-value"})
    lines = LogLines(lines=["one", "", "it is a-secret-value", ""])
    assert secrets.mask_event(lines) == LogLines(lines=["one", "", "it is ***", ""])
    assert secrets.mask_event(LogLines(lines=[])) == LogLines(lines=[])
    failed = Failed(cause_type="ValueError", cause_message="a-secret-value", traceback="t", is_echo=True)
    masked = Failed(cause_type="ValueError", cause_message="***", traceback="t", is_echo=True)
    assert secrets.mask_event(failed) == masked
