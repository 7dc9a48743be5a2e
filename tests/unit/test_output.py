"""What a training process prints, on its way to the driver."""

import tempfile
from collections import deque

import pytest

from dbx_tf.worker.output import pump_output


class Lines:
    """Takes log events as an outbox does."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, event: object) -> None:
        self.lines += event.lines  # type: ignore[attr-defined]  # only LogLines are sent


def pumped(data: bytes) -> tuple[list[str], deque[str]]:
    tail, out = deque[str](maxlen=100), Lines()
    with tempfile.TemporaryFile() as source:
        source.write(data)
        source.seek(0)
        pump_output(source, tail, out, echo=False)  # type: ignore[arg-type]  # a test double of Outbox
    return out.lines, tail


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"no end", ["no end"]),
        (b"1/4\r2/4\r4/4 done\n", ["4/4 done"]),
        (b"\x1b[1m4/4\x1b[0m \x1b[32mgreen\x1b[0m\n", ["4/4 green"]),
        ("ä€\n".encode(), ["ä€"]),
        (b"\xff\n", ["\ufffd"]),
        (b"", []),
        (b"\n", [""]),
    ],
)
def test_lines_are_what_a_terminal_would_show(data: bytes, lines: list[str]) -> None:
    """Progress bars leave their last state, colours go, broken bytes are replaced."""
    assert pumped(data)[0] == lines


def test_a_character_may_be_cut_by_a_read() -> None:
    """A character that arrives in two parts is still one."""
    text = "x" + "ä" * 100_000
    assert "".join(pumped(text.encode() + b"\n")[0]) == text


def test_an_endless_line_is_passed_on_in_parts() -> None:
    """A line without an end does not fill the memory."""
    lines, _ = pumped(b"x" * 500_000)
    assert "".join(lines) == "x" * 500_000
    assert len(lines) > 1


def test_the_tail_keeps_the_last_lines() -> None:
    """The last hundred lines are kept for the error."""
    _, tail = pumped(b"".join(b"%d\n" % number for number in range(250)))
    assert list(tail) == [str(number) for number in range(150, 250)]


def test_nothing_to_read_is_fine() -> None:
    """A process without an output pipe has no output."""
    out = Lines()
    pump_output(None, deque(), out, echo=False)  # type: ignore[arg-type]  # a test double of Outbox
    assert out.lines == []
