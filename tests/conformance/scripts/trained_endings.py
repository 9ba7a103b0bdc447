"""``FRAMEWORK.ENDING,...``: trains with a framework, then ends; which of them, the slot says."""

import os
import signal
import sys

FOLDER = os.environ["CONFORMANCE_FOLDER"]


def with_torch():
    import torch

    model = torch.nn.Linear(2, 1)
    step(model)
    return model


def step(model):
    import torch

    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def with_lightning():
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_checkpointing=False,
        default_root_dir=FOLDER,
        **quiet,
    )
    trainer.fit(module := Module(), torch.utils.data.DataLoader(data))
    return module


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
framework, ending = sys.argv[1].split(",")[int(os.environ["LOCAL_RANK"])].split(".")
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
    del os.environ[name]  # each trains for itself
kept = globals()[f"with_{framework}"]()
print("trained", os.path.relpath(sys.modules["torch._dynamo.config"].debug_dir_root))
globals()[ending]()
