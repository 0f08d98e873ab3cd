"""A small continuous-batching engine over random weights, which uses the library as an engine's author would."""

from __future__ import annotations
