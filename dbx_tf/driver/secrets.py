"""Keeps secrets out of what a run shows and logs.

Runs on: driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from dbx_tf.wire.events import Event

MASK: Final = "***"
_NAME: Final = re.compile(r"secret|password|token|credential|api_?key", re.IGNORECASE)
_MIN_CHARACTERS: Final = 8
"""Shorter values are no secrets (TOKENIZERS_PARALLELISM=false), and masking them would garble what is said."""


def is_secret(name: object) -> bool:
    """True if something of this name is not to be shown."""
    return _NAME.search(str(name)) is not None


class Secrets:
    """The values of secret names, in train_fn's arguments and in the driver's environment."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._values: set[str] = set()

    def mask(self, text: str) -> str:
        """The text without secrets; the environment is read anew, since tokens are renewed while a run goes on."""
        self._values.update(_secret_values(os.environ), _secret_values(self._arguments))
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, MASK)
        return text

    def mask_event(self, event: Event) -> Event:
        """What a worker says, without secrets."""
        changed: dict[str, Any] = {}
        for field in fields(event):
            value = getattr(event, field.name)
            if isinstance(value, str):
                changed[field.name] = self.mask(value)
            elif isinstance(value, list):
                changed[field.name] = self.mask("\n".join(value)).split("\n") if value else value
        return replace(event, **changed)


def _secret_values(named: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in named.items():
        if isinstance(value, Mapping):
            yield from _secret_values(value)
        elif isinstance(value, str) and len(value) >= _MIN_CHARACTERS and is_secret(name):
            yield value
