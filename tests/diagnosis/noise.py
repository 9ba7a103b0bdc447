"""Lines that programs write to stderr in runs that succeed, each of which has been taken for an error."""

from __future__ import annotations

from pathlib import Path

HARMLESS = tuple(Path(__file__).with_name("harmless.txt").read_text().splitlines())
