"""Draw what users wait for after a fault: ``python -m benchmarks.chart RESULTS.json docs/recovery.svg``.

The bars are medians of the benchmark ``frameworks``. The image adapts to light and dark pages.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

SUFFIX = ": worker SIGKILL"
COLOURS = ("#2563eb", "#9ca3af")
WIDTH, LEFT, RIGHT = 760, 200, 90
BAR, GAP, GROUP, TOP = 18, 4, 18, 62

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2937 }
.small { font-size: 12px; fill: #6b7280 }
.title { font-weight: 600 }
@media (prefers-color-scheme: dark) { text { fill: #e5e7eb } .small { fill: #9ca3af } }
"""


@dataclass(frozen=True)
class Bar:
    """``seconds``: a median; None: there was no recovery."""

    who: str
    seconds: float | None


def groups_of(results: dict[str, Any]) -> dict[str, list[Bar]]:
    """The bars of each script, in the order of the file."""
    groups: dict[str, list[Bar]] = {}
    for figure in results["benchmarks"]["frameworks"]["figures"]:
        if figure["what"].endswith(SUFFIX):
            bar = Bar(figure["who"], figure["median"])
            groups.setdefault(figure["what"].removesuffix(SUFFIX), []).append(bar)
    return groups


def draw(groups: dict[str, list[Bar]]) -> str:
    """The chart as SVG."""
    longest = max(bar.seconds or 0.0 for bars in groups.values() for bar in bars)
    whos = list(dict.fromkeys(bar.who for bars in groups.values() for bar in bars))
    colour = dict(zip(whos, COLOURS, strict=True))
    parts = [_text(0, 18, "From the SIGKILL of a worker to the next training step of every rank", "title")]
    at = 0
    for who in whos:
        parts.append(f'<rect x="{at}" y="30" width="12" height="12" rx="2" fill="{colour[who]}"/>')
        parts.append(_text(at + 18, 41, who, "small"))
        at += 40 + 7 * len(who)
    y = TOP
    for name, bars in groups.items():
        parts.append(_text(0, y + (len(bars) * (BAR + GAP)) / 2 + 3, name))
        for bar in bars:
            width = max(2.0, (WIDTH - LEFT - RIGHT) * (bar.seconds or 0.0) / longest)
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour[bar.who]}"/>'
            )
            parts.append(_text(LEFT + width + 6, y + BAR - 5, _seconds(bar.seconds)))
            y += BAR + GAP
        y += GROUP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
    title = f"<title>Recovery time by training script: {escape(', '.join(whos))}</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(text)}</text>'


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "no recovery"
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON file of a run of the benchmark 'frameworks'")
    parser.add_argument("image", type=Path, help="the SVG file to write")
    given = parser.parse_args()
    given.image.write_text(draw(groups_of(json.loads(given.results.read_text()))), encoding="utf-8")


if __name__ == "__main__":
    main()
