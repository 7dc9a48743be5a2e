"""Finds out whether the other workers can be reached, before TensorFlow would wait for them without a word.

Runs on: workers, in the Spark task.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from dbx_tf.cluster import split_address

_REACH_SECONDS: Final = 10.0


def find_unreachable(addresses: Sequence[str], worker_index: int) -> str:
    """What to say of the first other worker whose server can't be reached from here; empty if all can.

    Their ports are held but not listened to: that a connection is refused shows that the way is open.
    """
    for index, address in enumerate(addresses):
        if index == worker_index:
            continue
        try:
            socket.create_connection(split_address(address), timeout=_REACH_SECONDS).close()
        except ConnectionRefusedError:
            continue
        except OSError as error:
            return (
                f"worker {worker_index} on host {socket.gethostname()} can't reach worker {index} at {address} "
                f"({error}); workers that train together connect to each other on ephemeral ports; open the network "
                "between the servers, or look whether that server's name has the right address"
            )
    return ""
