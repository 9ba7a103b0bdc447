#!/usr/bin/env bash
# torch 2.13.0: `for batch in loader` of a DataLoader with shuffle=False and num_workers=0 draws a number from torch's
# global generator, so what the script draws afterwards (dropout, noise, the next permutation) is another.
# One would guess: what draws nothing at random leaves the random state as it is. A training that validates, or validates
# more often after a restart, is another training, although the same seed was set and the weights were not touched.
# With DataLoader(generator=...), the global one is left alone.
# Source: torch/utils/data/dataloader.py, _BaseDataLoaderIter.__init__, _base_seed.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/bin/python" - <<'PYTHON'
import torch
from torch.utils.data import DataLoader


def next_number(validate, generator=None):
    torch.manual_seed(0)
    if validate:
        for _ in DataLoader(range(4), shuffle=False, num_workers=0, generator=generator):
            pass
    return torch.rand(1).item()


plain, validated, with_own = next_number(False), next_number(True), next_number(True, torch.Generator())
print(f"the first number after the seed: {plain:.4f}; after a look at ordered data: {validated:.4f}, with a generator "
      f"of its own: {with_own:.4f}")
raise SystemExit(not (plain != validated and plain == with_own))
PYTHON
