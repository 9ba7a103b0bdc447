#!/usr/bin/env bash
# torch 2.13.0: a hook of torch.optim.optimizer.register_optimizer_step_post_hook is called twice for one step of an
# optimizer whose class overrides step() and calls super().step(): 24 calls for 12 steps of such a subclass of SGD, 12
# for SGD itself. ZeroRedundancyOptimizer and wrappers around optimizers show the same.
# One would guess: the documentation speaks of a hook that is called after each optimizer's step; nested calls are one.
# The cause is Optimizer.profile_hook_step, which wraps step() once for each class that defines it.
# Source: torch/optim/optimizer.py, Optimizer._patch_step_function and profile_hook_step.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/bin/python" - <<'PYTHON'
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

calls = []
register_optimizer_step_post_hook(lambda *_: calls.append(1))


class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def calls_of(kind):
    calls.clear()
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = kind([parameter], lr=0.1)
    for _ in range(12):
        parameter.grad = torch.ones(1)
        optimizer.step()
    return len(calls)


found = calls_of(torch.optim.SGD), calls_of(Clipped)
print(f"calls of the hook for 12 steps: SGD {found[0]}, a subclass that calls super().step() {found[1]}")
raise SystemExit(found != (12, 24))
PYTHON
