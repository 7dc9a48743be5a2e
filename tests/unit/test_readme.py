"""The README: what it promises exists."""

import ast
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

import dbx_tf
from dbx_tf.cluster import Topology

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_blocks_compile(block: str) -> None:
    """Every example is Python."""
    ast.parse(block)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_use_names_that_exist(block: str) -> None:
    """Imports, keyword arguments of Runner and attributes of results are real."""
    fields = {field.name for field in dataclasses.fields(dbx_tf.Runner)}
    known = {
        "result": {*dir(dbx_tf.RunResult)},
        "context": {*dir(dbx_tf.WorkerContext)},
        "runner": {*dir(dbx_tf.Runner)},
    }
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module == "dbx_tf":
            assert {alias.name for alias in node.names} <= set(dbx_tf.__all__)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Runner":
            assert {keyword.arg for keyword in node.keywords} <= fields
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            assert node.attr in known[node.value.id], node.attr


def test_make_commands_exist() -> None:
    """Every `make x` of the README is a target."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) - {"demo"} <= targets
    assert "demo" in targets


def test_help_lists_the_commands() -> None:
    """`make help` shows what there is."""
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert "make demo" in done.stdout
    assert "make test-fast" in done.stdout


def test_links_lead_somewhere() -> None:
    """Relative links are files of the project (of which the wheel's test has only some)."""
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    if (ROOT / ".git").exists():
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_is_short() -> None:
    """Nobody reads more than this."""
    assert len(README.splitlines()) <= 200


def test_the_topology_sentence_is_the_real_one() -> None:
    """What the README quotes is what the code says."""
    info = dbx_tf.cluster.WorkerInfo(0, "a", "10.0.0.1:1", "0", 1, ("CPU:0",), 1)
    other = dataclasses.replace(info, worker_index=1, host="b", address="10.0.0.2:1")
    assert f'"{Topology((info, other), 2)}"' in README
