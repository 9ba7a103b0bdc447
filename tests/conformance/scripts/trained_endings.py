"""``ENDING,...``: makes an optimizer step, then ends; which of them, the slot says."""

import os
import signal
import sys

import torch

FOLDER = os.environ["CONFORMANCE_FOLDER"]


def step():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model


def falls_off_the_end():
    pass


def exits_with_3():
    sys.exit(3)


def raises():
    raise ValueError("what is wrong")


def is_terminated():
    os.kill(os.getpid(), signal.SIGTERM)


def exits_at_once():
    os._exit(4)


os.chdir(FOLDER)
ending = sys.argv[1].split(",")[int(os.environ["LOCAL_RANK"])]
kept = step()
print("trained", type(kept).__name__)
globals()[ending]()
