"""Whether workers can reach each other is known before TensorFlow waits for it."""

import socket

import pytest

from dbx_tf.worker import peers
from dbx_tf.worker.peers import find_unreachable


def test_held_and_open_ports_can_be_reached() -> None:
    """A port that is bound but not listened to refuses, which shows that the way is open; one's own is not tried."""
    with socket.socket() as held, socket.create_server(("127.0.0.1", 0)) as served:
        held.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (held, served)]
        assert find_unreachable([*addresses, "256.0.0.1:1"], 2) == ""


def test_a_name_without_an_address_is_told() -> None:
    """Who can't reach whom is named, with what to look at."""
    text = find_unreachable(["127.0.0.1:1", "no-such-host.invalid:2222"], 0)
    assert "can't reach worker 1 at no-such-host.invalid:2222" in text
    assert "open the network between the servers" in text


def test_silence_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server behind a firewall that swallows packets is told after seconds."""
    monkeypatch.setattr(peers, "_REACH_SECONDS", 0.5)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # its queue holds one connection; those after it get no answer
        address = full.getsockname()
        with socket.create_connection(address):
            text = find_unreachable([f"127.0.0.1:{address[1]}", "127.0.0.1:1"], 1)
    assert "can't reach worker 0" in text
    assert "timed out" in text
