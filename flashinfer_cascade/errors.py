"""What can go wrong, as one small tree.

CascadeError
├── InvalidBatchError (ValueError)          the caller's block tables, lengths or other arguments are wrong
├── UnsupportedError                        correct input that no kernel here can serve
├── CapacityError                           a batch or a plan is larger than what was reserved for it
└── BackendUnavailableError (ImportError)   a library or a device that this call needs is missing

Every message gives the value, the limit and what to do. A configuration with a wrong value raises
`pydantic.ValidationError`, also a ``ValueError``; one that asks for what no kernel can do raises
`UnsupportedError`.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterable
from numbers import Integral
from types import UnionType
from typing import Any


class CascadeError(Exception):
    """Base of all errors that this package raises on purpose."""


class InvalidBatchError(CascadeError, ValueError):
    """Block tables, lengths or tensors contradict each other or the configuration, or are of a wrong type."""


class UnsupportedError(CascadeError):
    """A feature that cannot be computed correctly, refused by name."""


class CapacityError(CascadeError):
    """Something does not fit what was reserved; raised before anything is written.

    Attributes:
        lacking: name -> (needed, reserved) of what does not fit, where that is counted.
    """

    def __init__(self, message: str, lacking: dict[str, tuple[int, int]] | None = None) -> None:
        super().__init__(message)
        self.lacking = lacking or {}


class BackendUnavailableError(CascadeError, ImportError):
    """A library or device that this call needs is missing."""


def with_article(noun: str) -> str:
    """``an append`` or ``a decode``."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def told(name: str, value: object) -> str:
    """An argument of a wrong type, to begin a message with: ``part is 5``, or ``sinks is a list``."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return f"{name} is {reprlib.repr(value)}"
    return f"{name} is {with_article(type(value).__name__)}"


def check_type(name: str, value: object, kind: type | UnionType | tuple[type, ...], remedy: str) -> None:
    """Refuse an argument of another type.

    Raises:
        InvalidBatchError: says what it is, and what to do.
    """
    if not isinstance(value, kind):
        raise InvalidBatchError(f"{told(name, value)}: {remedy}")


def listed(name: str, values: object, remedy: str) -> list[Any]:
    """Several things as a list; a text is but one.

    Raises:
        InvalidBatchError: it is not several.
    """
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        with contextlib.suppress(TypeError):  # an array without dimensions
            return list(values)
    raise InvalidBatchError(f"{told(name, values)}: {remedy}")


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least so much.

    Raises:
        InvalidBatchError: says what it is, and what to give.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InvalidBatchError(f"{told(name, value)}: give an integer of at least {least}")
