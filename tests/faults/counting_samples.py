"""Runs examples/elastic_ddp.py as it stands, and writes down the ids of the samples of every finished step.

Until the file ``finish`` is there, a step takes a while, and longer in the course of the epoch, so that a test has the
time to change the world.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notes import note

import elastic_agent.data
from elastic_agent.data import ElasticBatchSampler, MicroBatch

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_ddp.py"
STEP_S = 0.04


class CountingSampler(ElasticBatchSampler):
    """Knows which samples are finished, from what it yielded and the script reports."""

    folder: Path

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._batches: deque[list[int]] = deque()
        self._micro: list[MicroBatch] = []
        self._note("born", [])

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            self._batches.append(batch)  # a loader may fetch ahead
            yield batch

    def micro_batches(self) -> Iterator[MicroBatch]:
        for micro in super().micro_batches():
            self._micro.append(micro)
            yield micro

    def advance(self) -> None:
        samples = [index for micro in self._micro for index in self._batches.popleft()[: micro.samples]]
        self._micro.clear()
        super().advance()
        self._note("step", samples)
        done = self.samples_finished / self._length
        ends_s = time.monotonic() + STEP_S * (1 if done < 0.4 else 10 if done < 0.7 else 100)
        while time.monotonic() < ends_s and not (self.folder / "finish").exists():
            time.sleep(STEP_S)

    def _note(self, kind: str, samples: list[int]) -> None:
        note(self.folder, kind, step=self.samples_finished, epoch=self.epoch, samples=samples)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options, arguments = parser.parse_known_args()
    CountingSampler.folder = options.folder
    elastic_agent.data.ElasticBatchSampler = CountingSampler  # type: ignore[misc]
    sys.argv = [str(EXAMPLE), "--checkpoint-dir", str(options.folder), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
