"""What can go wrong, as one small tree.

CascadeError
├── InvalidBatchError (ValueError)          the caller's block tables or lengths are wrong
├── UnsupportedError                        correct input that no kernel here can serve
├── CapacityError                           a batch or a plan is larger than what was reserved for it
└── BackendUnavailableError (ImportError)   a library or a device that this call needs is missing

Every message gives the value, the limit and what to do. A configuration with a wrong value raises
`pydantic.ValidationError`, also a ``ValueError``; one that asks for what no kernel can do raises
`UnsupportedError`.
"""

from __future__ import annotations


class CascadeError(Exception):
    """Base of all errors that this package raises on purpose."""


class InvalidBatchError(CascadeError, ValueError):
    """Block tables, lengths or tensors contradict each other or the configuration."""


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
