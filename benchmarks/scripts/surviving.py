"""Training of a small transformer with its state in memory: from a fault on, the next step is the one that failed."""

from events import FOLDER, Rounds  # isort: skip

import torch
from torch import nn

from elastic_agent import survive

CHECKPOINT = FOLDER / "surviving.pt"
SAVE_EVERY = 20
WIDTH, LENGTH, BATCH = 128, 16, 4

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
state = survive.State(model=model, optimizer=optimizer)
state.load(CHECKPOINT)


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
        if state.step % SAVE_EVERY == 0:
            state.save(CHECKPOINT)


train()
