"""How events get from the workers to the driver and back: authenticated TCP, one line of JSON per event.

Runs on: driver (Listener) and workers (connect).
"""

from __future__ import annotations

import contextlib
import hmac
import io
import logging
import queue
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from dbx_tf.cluster import join_address
from dbx_tf.errors import ClusterError
from dbx_tf.wire.events import Event, Hello, ProtocolError, Role, Welcome, decode, encode

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 4 << 20
_MAX_HELLO_BYTES: Final = 4096
_HELLO_TIMEOUT_SECONDS: Final = 10.0
_CONNECT_TIMEOUT_SECONDS: Final = 30.0
_SILENCE_SECONDS: Final = 30
"""Clouds freeze servers for so long when they move them (Azure: up to 30 s), which is no reason to give them up."""
_BODY_IN_MEMORY_BYTES: Final = 1 << 20
_CONNECTIONS_PER_WORKER: Final = 8

Body = bytes | Path


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where the driver listens, and the secret of this run."""

    host: str
    port: int
    token: str = field(repr=False)


class Connection:
    """One end of a connection; sending is safe from several threads, receiving is for one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, event: Event, body: Body = b"") -> None:
        """Send an event and its body; a Path is streamed, so a model may be larger than the memory.

        Raises:
            OSError: If the other side is gone.
        """
        size = body.stat().st_size if isinstance(body, Path) else len(body)
        with self._lock:
            self._socket.sendall(encode(event, size))
            if isinstance(body, Path):
                with body.open("rb") as source:
                    self._socket.sendfile(source)
            elif body:
                self._socket.sendall(body)

    def receive(self, *, max_line_bytes: int = MAX_LINE_BYTES) -> tuple[Event, IO[bytes]]:
        """Wait for the next event; its body is a file, at its start, in memory or a temporary one.

        Raises:
            EOFError: If the other side has closed the connection.
            ProtocolError: If what arrives is not of this protocol, or longer than `max_line_bytes`.
        """
        try:
            return read_message(self._reader, max_line_bytes)
        except ValueError:  # closed here, by another thread
            raise EOFError("the connection is closed") from None

    def set_timeout(self, seconds: float | None) -> None:
        """Let receiving fail with TimeoutError after so many seconds (None: wait for ever)."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close both directions; a thread that waits in `receive` gets EOFError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait of a thread in receive, which holds the reader
        with contextlib.suppress(OSError):
            self._reader.close()
        self._socket.close()


def read_message(reader: IO[bytes], max_line_bytes: int = MAX_LINE_BYTES) -> tuple[Event, IO[bytes]]:
    """Read the next event and its body from a stream; see `Connection.receive`.

    Raises:
        EOFError: If the stream has ended.
        ProtocolError: If what it holds is not of this protocol, or longer than `max_line_bytes`.
    """
    line = reader.readline(max_line_bytes + 1)
    if not line:
        raise EOFError("the connection is closed")
    if not line.endswith(b"\n"):
        raise ProtocolError(f"a line is longer than {max_line_bytes} bytes, or was cut")
    event, remaining = decode(line)
    if remaining <= _BODY_IN_MEMORY_BYTES:
        body: IO[bytes] = io.BytesIO(reader.read(remaining))
        remaining -= len(body.read())
    else:
        body = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    while remaining:
        chunk = reader.read(min(remaining, 1 << 20))
        if not chunk:
            raise EOFError("the connection was closed in the middle of a message")
        body.write(chunk)
        remaining -= len(chunk)
    body.seek(0)
    return event, body


def connect(
    address: ChannelAddress,
    worker_index: int,
    role: Role,
    attempt: int = 0,
    timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS,
) -> Connection:
    """Open a worker's connection to the driver.

    Raises:
        ClusterError: If the driver can't be reached from here.
    """
    try:
        sock = socket.create_connection((address.host, address.port), timeout=timeout_seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_silence(sock)
        connection = Connection(sock)
        connection.send(Hello(token=address.token, worker_index=worker_index, role=role, attempt=attempt))
        connection.receive(max_line_bytes=_MAX_HELLO_BYTES)  # Welcome: it is this run's driver that listens there
        connection.set_timeout(None)
    except (OSError, EOFError, ProtocolError) as error:
        raise ClusterError(
            f"worker {worker_index} on host {socket.gethostname()} can't reach the driver at "
            f"{join_address(address.host, address.port)} ({error}); workers report to the driver over TCP; "
            "open the cluster's network between workers and driver for ephemeral ports, or set spark.driver.host to "
            "an address of the driver that the workers can reach"
        ) from None
    return connection


def _notice_silence(sock: socket.socket) -> None:
    """Have the kernel end the connection when the other host has not answered for half a minute.

    Otherwise a link that is cut, or a host that is gone, would look like one that has nothing to say.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": _SILENCE_SECONDS * 1000}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Outbox:
    """Sends events from a thread of its own, in order, so that training never waits for the network."""

    def __init__(self, connection: Connection, *, max_events: int = 100_000) -> None:
        self._connection = connection
        self._queue: queue.Queue[Event | None] = queue.Queue(max_events)
        self._thread = threading.Thread(target=self._run, name="dbx_tf-outbox", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event; when the driver is so far behind that the queue is full, it is dropped."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(event)

    def flush(self, timeout_seconds: float = 60.0) -> None:
        """Send what is queued and end the thread; nothing may be put afterwards."""
        with contextlib.suppress(queue.Full):  # when the thread has left, for want of a driver
            self._queue.put(None, timeout=timeout_seconds)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._connection.send(event)
            except OSError:
                return  # the driver is gone: the task notices it on its own connection and ends this process


class Requests:
    """Asks the other side and waits for its answer; one question at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def ask(self, event: Event, body: Body) -> tuple[Event, IO[bytes]]:
        """Send an event and return what comes back.

        Raises:
            OSError, EOFError: If the other side is gone.
        """
        with self._lock:
            self._connection.send(event, body)
            return self._connection.receive()


Handler = Callable[[Connection, Hello, Event, IO[bytes]], None]
"""Called for each event, in the thread of its connection; it owns the body."""


class Listener:
    """The driver's end: accepts the workers of one run and hands their events to a handler."""

    def __init__(self, host: str, num_workers: int, handler: Handler, on_close: Callable[[Connection, Hello], None]):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=4 * num_workers + 16)
        self.address = ChannelAddress(host, self._socket.getsockname()[1], secrets.token_hex(16))
        self._num_workers, self._handler, self._on_close = num_workers, handler, on_close
        self._slots = threading.BoundedSemaphore(_CONNECTIONS_PER_WORKER * num_workers + 16)
        self._open: set[Connection] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="dbx_tf-listener", daemon=True).start()

    @property
    def has_connections(self) -> bool:
        """True while a connection is open."""
        with self._lock:
            return bool(self._open)

    def close(self) -> None:
        """Stop listening and close every connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._socket.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="dbx_tf-channel", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        _notice_silence(sock)
        connection = Connection(sock)
        with self._lock:
            self._open.add(connection)
        try:
            if (hello := self._greet(connection)) is not None:
                connection.send(Welcome())
                try:
                    while True:
                        self._handler(connection, hello, *connection.receive())
                finally:
                    self._on_close(connection, hello)
        except (EOFError, OSError):
            pass  # how a connection ends; what it means is decided by whoever gets on_close
        except ProtocolError as error:
            logger.warning("closed a connection that broke the protocol: %s", error)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
            self._slots.release()

    def _greet(self, connection: Connection) -> Hello | None:
        connection.set_timeout(_HELLO_TIMEOUT_SECONDS)
        hello, _ = connection.receive(max_line_bytes=_MAX_HELLO_BYTES)
        connection.set_timeout(None)
        if not isinstance(hello, Hello) or not isinstance(hello.token, str):
            return None
        if not hmac.compare_digest(hello.token.encode(), self.address.token.encode()):
            logger.warning("refused a connection with a wrong token")
            return None
        return hello if hello.worker_index in range(self._num_workers) else None


def save_body(body: IO[bytes], path: Path) -> None:
    """Write a received body to a file, whose folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        shutil.copyfileobj(body, target, 1 << 20)
