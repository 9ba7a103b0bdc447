"""What makes two trainings the same, and what does not."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

from elastic_agent.integrations import signature
from elastic_agent.integrations.signature import Signature


@dataclass
class Options:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)


class Net(torch.nn.Module):
    def __init__(self, width: int = 3, dropout: float = 0.1, lr: float = 0.1) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(dropout))
        self.lr = lr


class Other(Net):
    pass


class Images(Dataset[int]):
    """One whose samples and files nothing may touch."""

    def __init__(self, size: int = 8, folder: str = "a") -> None:
        self.size, self.folder = size, Path(folder)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a sample was loaded")


def values(data: Any) -> Signature:
    return signature.of_values("v", data)


def data(found: Any) -> Signature:
    return signature.of_data("d", found)


def adam(lr: float, **options: Any) -> Signature:
    return signature.of_optimizers([torch.optim.AdamW(Net().parameters(), lr=lr, **options)])


def seeded(seed: int) -> Signature:
    torch.manual_seed(seed)
    torch.rand(3)
    return signature.of_seed()


def differs(earlier: Signature, now: Signature, ratio: float = 1.0) -> str:
    """Also checks that the signatures survive a file."""
    restored = json.loads(json.dumps(earlier))
    assert signature.difference(restored, earlier, 1.0) == ""
    return signature.difference(restored, now, ratio)


class Archive(Mapping[str, int]):
    """One whose content nothing may load."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("it was loaded")

    def __getitem__(self, name: str) -> int:
        raise AssertionError("it was loaded")


MANY = list(range(100_000))
FOLDS: Any = [np.array([1, 2, 5]), np.array([0, 3, 4])]

OTHERS: list[tuple[str, Callable[[], Signature], Callable[[], Signature]]] = [
    ("v.lr", lambda: values({"lr": 0.1}), lambda: values({"lr": 0.2})),
    ("v.lr", lambda: values(argparse.Namespace(lr=0.1)), lambda: values(argparse.Namespace(lr=0.2))),
    ("v.lr", lambda: values(Options()), lambda: values(Options(lr=0.2))),
    ("v.betas.1", lambda: values(Options()), lambda: values(Options(betas=(0.9, 0.99)))),
    ("v.new", lambda: values({}), lambda: values({"new": 1})),
    ("v.gone", lambda: values({"gone": 1}), lambda: values({})),
    ("v.model.width", lambda: values({"model": {"width": 1}}), lambda: values({"model": {"width": 2}})),
    ("v.amp", lambda: values({"amp": True}), lambda: values({"amp": 1.5})),
    ("v.lr", lambda: values({"lr": torch.tensor(1.0)}), lambda: values({"lr": np.float32(2.0)})),
    ("v", lambda: values(MANY), lambda: values(MANY[:-1])),
    ("v", lambda: values(np.zeros((50, 50))), lambda: values(np.zeros((50, 51)))),
    ("v", lambda: values({"a"}), lambda: values({"a", "b"})),
    ("v", lambda: values("x" * 999), lambda: values("y" * 999)),
    ("model.parameters", lambda: signature.of_model(Net()), lambda: signature.of_model(Net(width=4))),
    ("model.layers", lambda: signature.of_model(Net()), lambda: signature.of_model(Net(dropout=0.2))),
    ("model.lr", lambda: signature.of_model(Net()), lambda: signature.of_model(Net(lr=0.2))),
    ("model", lambda: signature.of_model(Net()), lambda: signature.of_model(Other())),
    ("optimizer.0.0.lr", lambda: adam(0.1), lambda: adam(0.2)),
    ("optimizer.0.0.weight_decay", lambda: adam(0.1), lambda: adam(0.1, weight_decay=0.3)),
    ("seed", lambda: seeded(1), lambda: seeded(2)),
    ("d.length", lambda: data(Images()), lambda: data(Images(9))),
    ("d.folder", lambda: data(Images()), lambda: data(Images(folder="b"))),
    ("d.0.length", lambda: data([Images()]), lambda: data([Images(9)])),
    ("d.batch_size", lambda: data(DataLoader(Images())), lambda: data(DataLoader(Images(), 2))),
    ("d.indices", lambda: data(Subset(Images(), [1, 2])), lambda: data(Subset(Images(), [2, 3]))),
    ("d.indices", lambda: data(Subset(Images(), MANY[1:])), lambda: data(Subset(Images(), MANY[:-1]))),
    ("d.indices", lambda: data(Subset(Images(), FOLDS[0])), lambda: data(Subset(Images(), FOLDS[1]))),
    (
        "d.sampler.indices",
        lambda: data(DataLoader(Images(), sampler=SubsetRandomSampler([1, 2]))),
        lambda: data(DataLoader(Images(), sampler=SubsetRandomSampler([2, 3]))),
    ),
]


@pytest.mark.parametrize(
    ("name", "earlier", "now"), OTHERS, ids=[f"{n}-{name}" for n, (name, *_) in enumerate(OTHERS)]
)
def test_another_training_is_told_by_what_differs(
    name: str, earlier: Callable[[], Signature], now: Callable[[], Signature]
) -> None:
    assert differs(earlier(), earlier()) == ""
    assert differs(earlier(), now()).startswith(f"{name} is ")


def test_a_selection_of_rows_of_the_package_datasets_is_told() -> None:
    from datasets import Dataset as Rows  # type: ignore[import-untyped]

    rows = Rows.from_dict({"x": [*range(9)]})
    assert differs(data(rows.select([1, 3, 5])), data(rows.select([2, 4, 6]))).startswith("d.rows is ")


SAME: list[tuple[str, Callable[[], Signature]]] = [
    ("objects", lambda: values({"network": Net(), "callback": differs, "nothing": None, "kind": Net})),
    ("nan", lambda: values({"lr": float("nan"), "most": float("inf")})),
    ("lazy", lambda: signature.of_model(torch.nn.LazyLinear(3))),
    ("meta", lambda: signature.of_model(torch.nn.Linear(3, 3, device="meta"))),
    ("loader", lambda: data({"train": DataLoader(Images(), num_workers=0, shuffle=True)})),
    ("samples", lambda: data(torch.utils.data.ConcatDataset([Images(), Images()]))),
    ("random tensors", lambda: data(TensorDataset(torch.randn(99, 3), torch.randint(9, (99,))))),
    ("a random split", lambda: data(torch.utils.data.random_split(Images(99), [90, 9])[0])),
    (
        "a random example",
        lambda: values({"example_input_array": torch.rand(3, 3), "weights": np.random.rand(4)}),
    ),
    ("files in the order of a folder", lambda: values({"files": [str(n) for n in torch.randperm(99)]})),
    ("iterable", lambda: data(iter([1, 2]))),
    (
        "of the machine",
        lambda: values({name: os.urandom(3).hex() for name in ("num_workers", "gpu", "hf_device_map")}),
    ),
    (
        "of the start",
        lambda: values({name: os.urandom(3).hex() for name in ("run_name", "log_dir", "version")}),
    ),
    ("a folder of the machine", lambda: values({"root": f"/scratch/{os.urandom(3).hex()}/data"})),
    ("a date", lambda: values({"tag": f"run-2026-11-{os.urandom(1)[0] % 20 + 10}", "n": 1.7e9})),
    ("a lazy collection", lambda: values({"archive": Archive()})),
]


@pytest.mark.parametrize("facts", [facts for _, facts in SAME], ids=[name for name, _ in SAME])
def test_the_same_training_in_another_process_has_no_difference(facts: Callable[[], Signature]) -> None:
    assert differs(facts(), facts()) == ""


def test_a_script_that_seeds_nothing_is_the_same_training_in_another_process() -> None:
    code = "import json; from elastic_agent.integrations import signature; print(json.dumps(signature.of_seed()))"
    earlier, now = (
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert differs(earlier, now) == ""
    torch.seed()
    assert differs(earlier, signature.of_seed()) == "", "as a worker that was forked has it"


def test_a_time_of_the_clock_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    assert differs(values({"started": 1.7e9 - 60.0}), values({"started": 1.7e9})) == ""
    assert differs(values({"tokens": 1.5e9}), values({"tokens": 1.6e9})) != ""


def test_a_random_split_of_the_package_datasets_is_no_difference() -> None:
    from datasets import Dataset as Rows

    rows = Rows.from_dict({"x": [*range(99)]})
    assert differs(data(rows.train_test_split(0.1)["train"]), data(rows.train_test_split(0.1)["train"])) == ""


def test_describing_a_training_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    model = Net()
    torch.set_rng_state(before[0])
    for facts in (signature.of_model(model), data(DataLoader(Images(), shuffle=True)), signature.of_seed()):
        assert facts
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("earlier", "now", "ratio"),
    [
        ({"lr": 0.1}, {"lr": 0.2}, 2.0),
        ({"lr": 0.2}, {"lr": 0.2 / 2**0.5}, 0.5),
        ({"batch": 1024 // 2}, {"batch": 1024 // 3}, 1.5),
        ({"accumulate": 8}, {"accumulate": 4}, 2.0),
        ({"lr": 0.1, "batch": 32}, {"lr": 0.1, "batch": 32}, 3.0),
    ],
)
def test_what_scripts_scale_with_the_number_of_workers_is_no_difference_in_another_world(
    earlier: dict[str, Any], now: dict[str, Any], ratio: float
) -> None:
    assert differs(values(earlier), values(now), ratio) == ""
    assert ratio in (1.0, 3.0) or differs(values(earlier), values(now)) != ""


@pytest.mark.parametrize("name", ["seed", "v.fold"])
def test_no_script_scales_its_seed_or_its_fold_with_the_number_of_workers(name: str) -> None:
    assert differs({name: 1}, {name: 2}, 2.0) == f"{name} is 2 and was 1"


@pytest.mark.parametrize(
    ("earlier", "now", "ratio"),
    [
        ({"batch": 128}, {"batch": 126}, 3.0),
        ({"steps": 12510}, {"steps": 9390}, 4 / 3),
        ({"n": 1 / 333}, {"n": 1 / 250}, 4 / 3),
    ],
)
def test_numbers_may_be_rounded_when_they_are_scaled(earlier: Any, now: Any, ratio: float) -> None:
    assert differs(values(earlier), values(now), ratio) == ""


@pytest.mark.parametrize(("earlier", "now"), [(2, 3), (1, 2), (3, 5)])
def test_small_numbers_are_not_alike_because_they_could_be_rounded(earlier: int, now: int) -> None:
    assert differs(values({"depth": earlier}), values({"depth": now}), 8 / 7) != ""


def test_samples_that_are_divided_among_the_workers_are_no_difference_in_another_world() -> None:
    two, three = (data(Subset(Images(12), range(0, 12, world))) for world in (2, 3))
    assert differs(two, three, 1.5) == ""
    assert differs(two, three) != ""


def test_data_in_a_long_list_is_described_by_its_length() -> None:
    samples = [{"input_ids": [*range(128)], "label": 1}] * 5000
    assert data(samples) == {"d": "builtins.list", "d.length": 5000}


def test_hyperparameters_of_omegaconf_are_described_without_being_resolved() -> None:
    from omegaconf import OmegaConf

    config = {
        "lr": 0.1,
        "to": "${oc.env:NO_SUCH_VARIABLE}",
        "missing": "???",
        "layers": [1, 2],
        "sub": {"x": "${lr}"},
    }
    earlier, now = (values(OmegaConf.create({**config, "layers": layers})) for layers in ([1, 2], [1, 3]))
    assert differs(earlier, earlier) == ""
    assert differs(earlier, now) == "v.layers.1 is 3 and was 2"


class Broken:
    """An array whose shape cannot be read, and a training that cannot be described."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape")

    dtype = "float32"

    def named_parameters(self) -> Any:
        raise RuntimeError("no parameters")


def test_what_cannot_be_described_breaks_no_training() -> None:
    assert values({"x": Broken()}) == {"v.x": "not known"}
    first, second = (signature.described(signature.of_model, Broken()) for _ in range(2))
    assert differs(first, second) != "", "nothing is known, so it is not continued"
    assert signature.described_late(signature.of_model, Broken()) == {}
