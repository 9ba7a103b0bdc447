#!/usr/bin/env bash
# torch 2.13.0: making the first optimizer of a process, an SGD of one parameter, imports torch._dynamo: over 800 modules
# and more than a second of processor time, although nothing is compiled. With triton installed, as with builds for
# GPUs, triton is imported too.
# One would guess: the compiler is imported by torch.compile. A process that is to start fast, or is forked often, pays
# for it in its first training step, not in `import torch`.
# Source: torch/optim/optimizer.py (the functions decorated with torch._disable_dynamo), torch/_compile.py.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/bin/python" - <<'PYTHON'
import sys

import torch

before, had = len(sys.modules), "torch._dynamo" in sys.modules
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
after, has = len(sys.modules), "torch._dynamo" in sys.modules
print(f"modules: {before} after `import torch`, {after} after the first optimizer; torch._dynamo: {had}, then {has}")
raise SystemExit(not (not had and has and after - before > 500))
PYTHON
