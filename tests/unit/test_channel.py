"""The channel: what goes in comes out, and what does not belong is kept out."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from dbx_tf.errors import ClusterError
from dbx_tf.wire import events
from dbx_tf.wire.channel import ChannelAddress, Connection, Listener, Outbox, connect
from dbx_tf.wire.events import Event, Hello, ProtocolError, Role, decode, encode

EXAMPLES: list[Event] = [
    events.Joined(attempt=1, host="h", address="h:1", executor="0", versions={"python": "3.12"}),
    events.Start(addresses=("a:1", "b:2")),
    events.Rejoin(attempt=2),
    events.Release(),
    events.Stop(reason="because"),
    events.LogLines(lines=["ä", "b\r"]),
    events.Exited(exit_code=-9, log_tail=["x"], num_oom_kills=1),
    events.Progressed(num_steps=3),
    events.Inspect(),
    events.Inspected(doing=events.Doing.BUSY, where="w", stacks="s"),
    events.Ready(pid=1, devices=["CPU:0"], num_replicas=2),
    events.PortTaken(),
    events.Metrics(values={"loss": float("nan")}, step=0, is_epoch=True, timestamp_ms=1),
    events.Notice(text="n"),
    events.Failed(cause_type="KeyError", cause_message="'x'", traceback="t", is_echo=False),
    events.ModelFile(path="a/b"),
    events.Finished(model_summary="s"),
    events.Call(method="log_batch"),
    events.Upload(artifact_uri="u", path="p"),
    events.Reply(error="e"),
    events.Welcome(),
    Hello(token="t", worker_index=0, role=Role.TASK),
]


class Collector:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[Hello, Event, bytes]] = []
        self.closed: list[Hello] = []
        self.connections: list[Connection] = []
        self._changed = threading.Condition()

    def handle(self, connection: Connection, hello: Hello, event: Event, body: IO[bytes]) -> None:
        with body, self._changed:
            self.got.append((hello, event, body.read()))
            self.connections.append(connection)
            self._changed.notify_all()

    def close(self, connection: Connection, hello: Hello) -> None:
        with self._changed:
            self.closed.append(hello)
            self._changed.notify_all()

    def wait_for(self, number: int, seconds: float = 20) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= number, timeout=seconds)

    def wait_for_close(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.closed, timeout=20)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def listener(collector: Collector) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 2, collector.handle, collector.close)
    yield listener
    listener.close()


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_event_round_trips(event: Event) -> None:
    """Every kind of event is the same after it was sent, NaN included."""
    copy, body_bytes = decode(encode(event, 7))
    assert encode(copy, 7) == encode(event, 7)
    assert type(copy) is type(event)
    assert body_bytes == 7


def test_every_kind_of_event_is_an_example() -> None:
    """A new kind of event can't be forgotten in these tests."""
    assert {type(event).__name__ for event in EXAMPLES} == set(Event.kinds)


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"[]\n",
        b"1\n",
        b'{"kind":"Nothing","body_bytes":0}\n',
        b'{"kind":"Release"}\n',
        b'{"kind":"Release","body_bytes":-1}\n',
        b'{"kind":"Release","body_bytes":0,"extra":1}\n',
        b"\xff\xfe\n",
    ],
)
def test_decode_refuses_what_is_not_of_the_protocol(line: bytes) -> None:
    """Garbage is one kind of error, whatever is wrong with it."""
    with pytest.raises(ProtocolError):
        decode(line)


def test_events_arrive_in_order_with_their_bodies(listener: Listener, collector: Collector, tmp_path: Path) -> None:
    """Bodies may be bytes or a file, and do not disturb what follows them."""
    file = tmp_path / "model"
    file.write_bytes(bytes(range(256)) * 20_000)
    connection = connect(listener.address, 1, Role.TRAINING)
    connection.send(events.Notice(text="one"), b"body")
    connection.send(events.ModelFile(path="m"), file)
    connection.send(events.Notice(text="two"))
    collector.wait_for(3)
    assert [type(event).__name__ for _, event, _ in collector.got] == ["Notice", "ModelFile", "Notice"]
    assert [body for _, _, body in collector.got] == [b"body", file.read_bytes(), b""]
    assert {hello.worker_index for hello, _, _ in collector.got} == {1}
    connection.close()
    collector.wait_for_close()


def test_the_driver_can_answer(listener: Listener, collector: Collector) -> None:
    """A connection carries events in both directions."""
    connection = connect(listener.address, 0, Role.TASK)
    connection.send(events.Notice(text="hello"))
    collector.wait_for(1)
    collector.connections[0].send(events.Start(addresses=("a:1",)))
    assert connection.receive()[0] == events.Start(addresses=("a:1",))


@pytest.mark.parametrize(
    "change", [{"token": "wrong"}, {"worker_index": 2}, {"worker_index": -1}, {"worker_index": "0"}, {"token": 5}]
)
def test_a_stranger_is_refused(listener: Listener, collector: Collector, change: dict[str, Any]) -> None:
    """Without the run's token, or as a worker that does not exist, nobody is heard."""
    hello = dataclasses.replace(Hello(token=listener.address.token, worker_index=0, role="task"), **change)
    with socket.create_connection((listener.address.host, listener.address.port)) as sock:
        sock.settimeout(20)
        sock.sendall(encode(hello, 0) + encode(events.Notice(text="evil"), 0))
        assert sock.recv(1) == b""
    assert collector.got == []


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 10_000, b"{" * 5_000 + b"\n"])
def test_garbage_is_cut_off(listener: Listener, collector: Collector, noise: bytes) -> None:
    """A port scanner does no harm, and the next worker gets through."""
    with socket.create_connection((listener.address.host, listener.address.port)) as sock:
        sock.settimeout(20)
        sock.sendall(noise)
        with contextlib.suppress(ConnectionResetError):  # closed with our bytes unread
            assert sock.recv(1) == b""
    connection = connect(listener.address, 0, Role.TASK)
    connection.send(events.Notice(text="fine"))
    collector.wait_for(1)


def test_many_silent_connections_leave_room(listener: Listener, collector: Collector) -> None:
    """Connections that say nothing are bounded in number, and dropped when they stay silent."""
    silent = [socket.create_connection((listener.address.host, listener.address.port)) for _ in range(100)]
    deadline = time.monotonic() + 30
    while not collector.got and time.monotonic() < deadline:
        try:
            connection = connect(listener.address, 0, Role.TASK)
            connection.send(events.Notice(text="fine"))
            collector.wait_for(1, seconds=1)
        except (OSError, AssertionError, ClusterError):
            continue
    assert collector.got
    for sock in silent:
        sock.close()


def test_closing_the_listener_ends_the_workers_wait(listener: Listener, collector: Collector) -> None:
    """A worker notices at once that the driver is gone."""
    connection = connect(listener.address, 0, Role.TASK)
    connection.send(events.Notice(text="hello"))
    collector.wait_for(1)
    listener.close()
    with pytest.raises((EOFError, OSError)):
        connection.receive()


def test_connect_says_what_it_could_not_reach() -> None:
    """A driver that can't be reached is named, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match=rf"worker 3 .*127\.0\.0\.1:{port}.*spark\.driver\.host"):
        connect(ChannelAddress("127.0.0.1", port, "t"), 3, Role.TASK)


def test_the_token_is_in_no_repr(listener: Listener) -> None:
    """What may end up in a log does not show the secret."""
    assert listener.address.token not in repr(listener.address)
    assert listener.address.token not in repr(Hello(token=listener.address.token, worker_index=0, role="task"))


def test_outbox_sends_in_order_and_never_waits(listener: Listener, collector: Collector) -> None:
    """Events put into an outbox arrive in their order, all of them before flush returns."""
    outbox = Outbox(connect(listener.address, 0, Role.TASK))
    for step in range(500):
        outbox.put(events.Metrics(values={}, step=step, is_epoch=False))
    outbox.flush()
    collector.wait_for(500)
    assert [event.step for _, event, _ in collector.got if isinstance(event, events.Metrics)] == list(range(500))


def test_outbox_survives_a_lost_driver(listener: Listener) -> None:
    """Training goes on to put events when nobody takes them any more."""
    connection = connect(listener.address, 0, Role.TASK)
    outbox = Outbox(connection, max_events=10)
    connection.close()
    for step in range(100):
        outbox.put(events.Metrics(values={}, step=step, is_epoch=False))
    outbox.flush(1)
