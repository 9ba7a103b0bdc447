"""Training of a small transformer with its state in memory: from a fault on, the next step is the one that failed.

Environment: BENCH_START_S, the seconds that the script takes before it trains.
"""

from events import FOLDER, Rounds, tell  # isort: skip

import os
import time

import torch
from torch import nn

from elastic_agent import survive

CHECKPOINT = FOLDER / "surviving.pt"
SAVE_EVERY = 20
WIDTH, LENGTH, BATCH = 128, 16, 4

time.sleep(float(os.environ.get("BENCH_START_S", "0")))  # as data sets, models and compilers take
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
state = survive.State(model=model, optimizer=optimizer)
state.load(CHECKPOINT)
last_s: list[float] = []
"""When this process has done its last step."""


@survive.train(state)
def train(world: survive.World) -> None:
    ddp = world.ddp(model)
    rounds = Rounds()
    while True:
        inputs = torch.randn(
            BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1000 * state.step + world.rank)
        )
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), inputs.roll(1, 1)).backward()
        optimizer.step()
        state.step += 1
        rounds.done()
        now_s = time.monotonic()
        if rounds.number == 1 and last_s:
            tell("pause", seconds=now_s - last_s[-1])
        last_s[:] = [now_s]
        if state.step % SAVE_EVERY == 0:
            state.save(CHECKPOINT)


train()
