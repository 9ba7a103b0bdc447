#!/usr/bin/env bash
# torch 2.13.0: Optimizer.load_state_dict casts every tensor of the state to its parameter's type. An optimizer that keeps
# float32 momentum for bfloat16 parameters has bfloat16 momentum after a resume, without a word, and goes on with it; a
# counter becomes bfloat16, which stays at 256 when 1 is added, unless the counter's name is "step".
# One would guess: what is loaded is what was saved; the file has float32. The name of an entry does not matter.
# Source: torch/optim/optimizer.py, Optimizer._process_value_according_to_param_policy.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/bin/python" - <<'PYTHON'
import torch


class Momentum(torch.optim.Optimizer):
    """Keeps its state in float32, whatever the parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                zero = torch.zeros(())
                state.update(momentum=torch.zeros_like(parameter, dtype=torch.float32), step=zero, count=zero)
            state["momentum"] = 0.9 * state["momentum"] + parameter.grad.float()
            state["step"], state["count"] = state["step"] + 1, state["count"] + 1
            parameter -= 0.1 * state["momentum"].to(parameter.dtype)


parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
parameter.grad = torch.full_like(parameter, 0.3)
first, second = Momentum([parameter]), Momentum([parameter])
for _ in range(256):
    first.step()
second.load_state_dict(first.state_dict())
kinds = {name: str(value.dtype).removeprefix("torch.") for name, value in second.state[parameter].items()}
second.step()
after = {name: second.state[parameter][name].item() for name in ("step", "count")}
print(f"saved as float32, loaded as {kinds}; after step 257: {after}")
expected = {"momentum": "bfloat16", "step": "float32", "count": "bfloat16"}
raise SystemExit((kinds, after) != (expected, {"step": 257.0, "count": 256.0}))
PYTHON
