"""Colours of the page, light and dark, and measures of how well they can be distinguished. Pure.

Series have the hues of Okabe and Ito, made darker on white and lighter on black until they contrast with the card
by at least 3; every area has a pattern besides, so that no meaning is in the colour alone.
"""

from __future__ import annotations

SERIES = ("blue", "orange", "green", "red", "purple", "grey")
"""Names of the colours of series."""
LIGHT = {
    "page": "#f5f6f8",
    "card": "#ffffff",
    "ink": "#16191f",
    "muted": "#545d6a",
    "line": "#d5dae1",
    "link": "#0b57a4",
    "blue": "#0b62a8",
    "orange": "#b87100",
    "green": "#009e73",
    "red": "#c8321e",
    "purple": "#9c4f8f",
    "grey": "#6d7683",
}
"""Colours by name, as #rrggbb, where the reader prefers light."""
DARK = {
    "page": "#111418",
    "card": "#1a1f26",
    "ink": "#e9ecf1",
    "muted": "#a5afbd",
    "line": "#3a434f",
    "link": "#8ec5ff",
    "blue": "#4f95f2",
    "orange": "#f0ac2e",
    "green": "#3fd0a0",
    "red": "#ff7a5c",
    "purple": "#dc9ad0",
    "grey": "#99a4b3",
}
"""The same where the reader prefers dark."""


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21, as WCAG 2 defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def css(colours: dict[str, str]) -> str:
    """Return the declarations of CSS variables."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _luminance(colour: str) -> float:
    return sum(
        weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), _linear(colour), strict=True)
    )


def _linear(colour: str) -> tuple[float, float, float]:
    red, green, blue = (_channel(int(colour[place : place + 2], 16) / 255) for place in (1, 3, 5))
    return red, green, blue


def _channel(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
