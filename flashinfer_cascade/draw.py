"""Elements of an SVG file as text: numbers are rounded, so that the same picture is the same file everywhere."""

from __future__ import annotations

from html import escape


def num(value: float) -> str:
    """Pixels, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, classes: str = "") -> str:
    """A line of text that begins at a point, unless its class says otherwise."""
    return f'<text x="{num(x)}" y="{num(y)}" class="{classes}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, title: str = "", more: str = "") -> str:
    """A rectangle; the title shows when the pointer rests on it.

    Args:
        x: left edge.
        y: upper edge.
        width: of it.
        height: of it.
        title: plain text.
        more: further attributes, with a blank before each.
    """
    box = f'<rect x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}"{more}'
    return f"{box}><title>{escape(title)}</title></rect>" if title else f"{box}/>"
