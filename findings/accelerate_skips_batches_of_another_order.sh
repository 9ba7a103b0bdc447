#!/usr/bin/env bash
# accelerate 1.15.0: the documented way to resume within an epoch, set_seed, load_state, skip_first_batches(loader, 5),
# skips five batches of another permutation than the one that the five were taken from: with shuffle=True, samples of
# the first part are seen again in this epoch, and others never; no error and no warning.
# One would guess: the seed is the same and the random state was saved and is restored, so the epoch goes on where it was.
# But what is restored is the state at the time of saving, and the sampler draws the epoch's permutation from it when the
# loader is iterated, that is, anew. With DataLoaderConfiguration(use_seedable_sampler=True), which is not the default, the
# epoch goes on.
# Source: accelerate/data_loader.py (skip_first_batches, SeedableRandomSampler), torch/utils/data/sampler.py (RandomSampler).
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0
cat > "$folder/train.py" <<'PYTHON'
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

folder, resumes, seedable = sys.argv[1], sys.argv[2] == "resume", sys.argv[3] == "seedable"
set_seed(7)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(torch.arange(12.0), shuffle=True)
)
if resumes:
    accelerator.load_state(f"{folder}/{sys.argv[3]}")
    loader = accelerator.skip_first_batches(loader, 5)
for index, batch in enumerate(loader):
    print(int(batch))
    accelerator.backward(model(batch[:, None]).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if not resumes and index == 4:
        accelerator.save_state(f"{folder}/{sys.argv[3]}")
        break
PYTHON
samples() {
    for part in begin resume; do "$folder/bin/python" "$folder/train.py" "$folder" $part "$1" 2>> "$folder/stderr"; done
}
plain=$(samples default) seedable=$(samples seedable)
echo "samples of the epoch of twelve, resumed after five: "$plain"; with the seedable sampler: "$seedable
[ "$(wc -l <<< "$plain")" = 12 ] && [ "$(sort -u <<< "$plain" | wc -l)" -lt 12 ] && [ "$(sort -u <<< "$seedable" | wc -l)" = 12 ]
