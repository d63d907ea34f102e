"""Parts of the self-contained SVG images that commands draw."""

from __future__ import annotations

import unicodedata
from html import escape

INK, FAINT, GRID = "#1f2933", "#66727f", "#e4e8ec"
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def legible(text: str) -> str:
    """Escape characters that XML cannot hold (control characters, half a surrogate pair, U+FFFE), as Python does."""
    return "".join(c if _in_xml(c) else ascii(c)[1:-1] for c in text)


def _in_xml(character: str) -> bool:
    """Return whether XML allows a character, and it is visible."""
    return unicodedata.category(character) not in ("Cc", "Cs") and ord(character) & 0xFFFE != 0xFFFE


def svg_begin(width: int, height: int, title: str) -> str:
    """Return the beginning of an image on white; `</svg>` ends it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{_FONT}">\n<title>{escape(legible(title))}</title>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>'
    )


def svg_text(x: float, y: float, text: str, size: int = 12, color: str = FAINT, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" {more}>{escape(legible(text))}</text>'


def shortened(text: str, width: float) -> str:
    """Return a text, with its middle left out if it is wider than `width` ems. Widths are estimates."""

    def ems(part: str) -> float:
        return sum(1.15 if c in "MW@%" or unicodedata.east_asian_width(c) in "WF" else 0.62 for c in part)

    if ems(text) <= width:
        return text
    kept = next(n for n in range(len(text) // 2, -1, -1) if ems(text[:n] + "…" + text[len(text) - n :]) <= width)
    return text[:kept] + "…" + text[len(text) - kept :]
