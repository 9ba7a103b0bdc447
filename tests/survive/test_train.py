"""A training goes on from memory after its processes were started again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic_agent import survive

from .support import Node, build, step, train_until, undisturbed, values

RESUMED = "elastic_agent.survive: resumed at step"


def fault(kind: str) -> None:
    """Fail as workers do."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "exit":
        sys.exit(3)
    raise RuntimeError("out of memory")


def train_to(
    steps: int, fail_at: int | None = None, kind: str = "raised", failing: tuple[int, ...] = (0, 1)
) -> Any:
    """Train with DDP, and fail in the middle of a step; returns the first step and the values at the end."""
    state = build()

    def take_step(world: survive.World, model: nn.Module) -> None:
        is_now = state.step == fail_at and world.rank in failing
        step(state, model, fail=lambda: fault(kind) if is_now else None)

    return train_until(state, steps, take_step, with_ddp=True), values(state)


@pytest.mark.parametrize("kind", ["raised", "exit", "terminated"])
def test_all_ranks_go_on_at_the_step_that_failed(two: Node, kind: str) -> None:
    expected_code = {"raised": 1, "exit": 3, "terminated": -signal.SIGTERM}[kind]
    first = two.run(train_to, 20, 7, kind, size=2)
    assert [worker.exitcode for worker in first] == [expected_code] * 2
    second = two.run(train_to, 20, size=2)
    assert [worker.said for worker in second] == [(7, undisturbed(20))] * 2, second
    assert f"{RESUMED} 7 from the memory of 2 of 2 workers" in second[0].errors


def test_a_killed_worker_gets_the_state_of_one_that_saw_it_fail(two: Node) -> None:
    first = two.run(train_to, 20, 7, "killed", (0,), size=2)
    assert [worker.exitcode for worker in first] == [-signal.SIGKILL, 1]
    second = two.run(train_to, 20, size=2)
    assert [worker.said for worker in second] == [(7, undisturbed(20))] * 2, second
    assert f"{RESUMED} 7 from the memory of 1 of 2 workers" in second[0].errors
    third = two.run(train_to, 20, size=2)  # what was received is a copy in the receiver's own memory
    assert f"{RESUMED} 20 from the memory of 2 of 2 workers" in third[0].errors


def test_a_world_of_another_size_goes_on(two: Node) -> None:
    two.run(train_to, 20, 7, size=1, first_slot=1)
    second = two.run(train_to, 20, size=2)
    assert [worker.said[0] for worker in second] == [7, 7]


def fail_within_optimizer(steps: int, fail: bool) -> Any:
    state = build(memory="500 ms")

    def stop(*_: Any) -> None:
        if fail and state.step == 3:
            raise RuntimeError("in the middle of a step")

    def take_step(world: survive.World, model: nn.Module) -> None:
        step(state)
        time.sleep(0.2)

    state.parts["optimizer"].register_step_post_hook(stop)
    return train_until(state, steps, take_step), values(state)


def test_a_state_in_the_middle_of_a_step_is_never_used(alone: Node) -> None:
    assert alone.run(fail_within_optimizer, 6, True)[0].exitcode == 1
    [second] = alone.run(fail_within_optimizer, 6, False)
    first_step, end = second.said
    assert first_step <= 3  # the last copy
    assert first_step > 0
    assert end == undisturbed(6)


# -- several trainings ------------------------------------------------------------------------------


def two_trainings(fail_in_second: bool) -> Any:
    """The same function with a model of the same shapes, twice; the process group is made anew."""
    firsts = []
    for number in range(2):
        state = build()

        @survive.train(state)
        def train(world: survive.World, number: int, state: survive.State) -> None:
            firsts.append(state.step)
            ddp = world.ddp(state.parts["model"])
            while state.step < 5:
                if fail_in_second and number == 1 and state.step == 3:
                    raise RuntimeError("out of memory")
                step(state, ddp)

        train(number, state)
        assert not dist.is_initialized()
    return firsts


def test_the_second_training_of_a_process_is_not_the_first_one(two: Node) -> None:
    assert [worker.said for worker in two.run(two_trainings, False, size=2)] == [[0, 0]] * 2
    # The memory holds the end of the second, so the first begins at its beginning, as without memory.
    again = two.run(two_trainings, True, size=2)
    assert [worker.exitcode for worker in again] == [1, 1]
    assert "the state in memory is not used" in again[0].errors
    assert [worker.said for worker in two.run(two_trainings, False, size=2)] == [[0, 0]] * 2


def pretrain_and_finetune(is_pretrained: bool) -> int:
    def pretrain(world: survive.World) -> None:
        step(first)

    first, second = build(), build()
    if not is_pretrained:
        survive.train(first)(pretrain)()
    return train_until(second, 3)


def test_a_training_goes_on_when_those_before_it_are_left_out(alone: Node) -> None:
    assert alone.run(pretrain_and_finetune, False)[0].said == 0
    assert alone.run(pretrain_and_finetune, True)[0].said == 3


def test_a_training_that_has_ended_is_at_its_end_after_a_restart(alone: Node) -> None:
    alone.run(train_to, 5)
    assert alone.run(train_to, 5)[0].said == (5, undisturbed(5))


def call_twice() -> list[int]:
    state = build()
    firsts = []

    @survive.train(state)
    def train(world: survive.World, steps: int) -> None:
        firsts.append(state.step)
        while state.step < steps:
            step(state)

    train(3)
    train(6)
    return firsts


def test_a_second_call_goes_on_where_the_first_one_ended(alone: Node) -> None:
    assert alone.run(call_twice)[0].said == [0, 3]


def call_within() -> str:
    state = build()

    @survive.train(state)
    def train(world: survive.World) -> None:
        train()

    with pytest.raises(RuntimeError, match="runs already") as caught:
        train()
    return str(caught.value)


def test_a_training_within_itself_is_refused(alone: Node) -> None:
    assert "expected a State for each" in alone.run(call_within)[0].said


# -- whose memory it is -----------------------------------------------------------------------------


def train_as(script: str, width: int) -> int:
    sys.modules["__main__"].__file__ = script
    return train_until(build(width), 4)


@pytest.mark.parametrize(("script", "width"), [("/b.py", 8), ("/a.py", 9)], ids=["script", "shapes"])
def test_the_memory_of_another_training_is_not_used(alone: Node, script: str, width: int) -> None:
    assert alone.run(train_as, "/a.py", 8)[0].said == 0
    [other] = alone.run(train_as, script, width)
    assert other.said == 0
    assert other.errors.count("\n") == 1
    assert "the state in memory is not used: it is of another training" in other.errors
    assert alone.run(train_as, script, width)[0].said == 4


def train_in_children() -> tuple[int | None, int | None, str]:
    """A forked process moves the state of this one, and trains one of its own; an executed one has no memory."""
    state = build(memory="1 ms")

    @survive.train(state)
    def train(world: survive.World) -> tuple[int | None, int | None, str]:
        step(state)

        def child() -> None:
            state.step = 99
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            assert train_as("/child.py", 8) == 0
            os.kill(os.getpid(), signal.SIGTERM)

        handler = multiprocessing.get_context("fork").Process(target=child)
        handler.start()
        handler.join()
        command = (
            "from elastic_agent.survive import _memory; assert _memory.Memory.of_worker(bytes(32), 1) is None"
        )
        executed = os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", command)
        return handler.exitcode, executed, signal.getsignal(signal.SIGTERM).__qualname__  # type: ignore[union-attr]

    return train()


def test_children_of_a_worker_leave_its_memory_alone(alone: Node) -> None:
    [first] = alone.run(train_in_children)
    assert first.said == (-signal.SIGTERM, 0, "_CopyOnSigterm._arrived"), first.errors
    [second] = alone.run(train_in_children)
    assert f"{RESUMED} 1 from the memory" in second.errors


# -- checkpoints ------------------------------------------------------------------------------------


def resume(path: Path, steps: int) -> int:
    state = build()
    state.load(path)
    first = train_until(state, steps)
    assert values(state) == undisturbed(state.step)
    return first


def write_checkpoint(path: Path, steps: int) -> None:
    torch.set_num_threads(1)
    state = build()
    while state.step < steps:
        step(state)
    state.save(path)


@pytest.mark.parametrize(
    ("in_checkpoint", "in_memory", "line"), [(3, 5, True), (5, 5, False), (8, 5, False), (None, 5, True)]
)
def test_the_newest_of_checkpoint_and_memory_is_used(
    alone: Node, tmp_path: Path, in_checkpoint: int | None, in_memory: int, line: bool
) -> None:
    path = tmp_path / "c.pt"
    alone.run(resume, path, in_memory)
    if in_checkpoint is not None:
        write_checkpoint(path, in_checkpoint)
    [again] = alone.run(resume, path, 9)
    assert again.said == max(in_checkpoint or 0, in_memory), again.errors
    assert (RESUMED in again.errors) is line


def load_on_one_rank(path: Path, steps: int) -> Any:
    state = build()
    state.load(path if os.environ["RANK"] == "1" else path.with_name("none"))
    return train_until(state, steps), values(state)


@pytest.mark.parametrize("memory", [True, False])
def test_ranks_without_the_checkpoint_get_its_state(two: Node, tmp_path: Path, memory: bool) -> None:
    path = tmp_path / "c.pt"
    write_checkpoint(path, 4)
    workers = two.run(load_on_one_rank, path, 6, size=2, memory=memory)
    assert [worker.said for worker in workers] == [(4, undisturbed(6))] * 2


def train_unlike() -> int:
    return train_until(build(8 if os.environ["RANK"] == "0" else 9), 1)


def test_ranks_with_different_models_are_told_so(two: Node) -> None:
    for worker in two.run(train_unlike, size=2):
        assert worker.exitcode == 1
        assert "the state of rank 1 has other parts, shapes or types than that of rank 0" in worker.errors


# -- what a script does beside ----------------------------------------------------------------------


def make_group(where: str, fail: bool) -> int:
    if where == "before":
        dist.init_process_group("gloo")
    state = build()

    @survive.train(state)
    def train(world: survive.World) -> int:
        first = state.step
        if where == "inside":
            dist.init_process_group("gloo")
        ddp = world.ddp(state.parts["model"])
        os.closerange(100, 4096) if fail else None
        while state.step < 6:
            if fail and state.step == 4:
                raise RuntimeError("out of memory")
            step(state, ddp)
        return first

    first = train()
    assert dist.is_initialized()  # it is the script's
    dist.destroy_process_group()
    return first


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_script_may_make_the_process_group(two: Node, where: str) -> None:
    assert [worker.exitcode for worker in two.run(make_group, where, True, size=2)] == [1, 1]
    assert [worker.said for worker in two.run(make_group, where, False, size=2)] == [4, 4]


def close_descriptors(steps: int) -> int:
    state = build(memory="1 ms")

    def take_step(world: survive.World, model: nn.Module) -> None:
        step(state)
        for name in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{name}") and "memfd" in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))

    return train_until(state, steps, take_step)


def test_a_script_may_close_descriptors(alone: Node) -> None:
    assert alone.run(close_descriptors, 4)[0].said == 0
    assert alone.run(close_descriptors, 8)[0].said == 4


def handle_sigterm(when: str) -> list[Any]:
    heard: list[Any] = []
    earlier = lambda number, frame: heard.append("earlier")  # noqa: E731
    later = lambda number, frame: heard.append("later")  # noqa: E731
    if when != "never":
        signal.signal(signal.SIGTERM, earlier)
    state = build()

    @survive.train(state)
    def train(world: survive.World) -> None:
        heard.append(state.step)
        if when == "inside":
            signal.signal(signal.SIGTERM, later)
        step(state)
        step(state, fail=lambda: os.kill(os.getpid(), signal.SIGTERM))

    train()
    current = signal.getsignal(signal.SIGTERM)
    names = {earlier: "earlier", later: "later", signal.SIG_DFL: "default"}
    return [*heard, names.get(current, current)]


@pytest.mark.parametrize(("when", "heard"), [("before", "earlier"), ("inside", "later")])
def test_the_handlers_of_a_script_are_called_and_left(alone: Node, when: str, heard: str) -> None:
    assert alone.run(handle_sigterm, when)[0].said == [0, heard, heard]


def train_in_thread() -> Any:
    said: list[Any] = []
    thread = threading.Thread(target=lambda: said.append(train_to(4)))
    thread.start()
    thread.join()
    return said[0][0], signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_training_in_another_thread_installs_no_handler(alone: Node) -> None:
    assert alone.run(train_in_thread)[0].said == (0, True)
    assert alone.run(train_in_thread)[0].said == (4, True)


def train_without_files(value: str) -> Any:
    os.environ["ELASTIC_AGENT_STATE_MEMORY"] = value
    return train_to(3)[0]


def test_memory_that_cannot_be_opened_is_one_line(alone: Node) -> None:
    [worker] = alone.run(train_without_files, "/proc/self/fd/9999:/proc/self/fd/9998")
    assert worker.said == 0
    lines = [line for line in worker.errors.splitlines() if line.startswith("elastic_agent.survive: ")]
    assert len(lines) == 1
    assert "no copies in memory: [Errno 2] No such file or directory: '/proc/self/fd/9999'" in lines[0]


class Broken:
    """A part that cannot be saved any more after some steps."""

    def __init__(self) -> None:
        self.content: Any = 0

    def state_dict(self) -> dict[str, Any]:
        if self.content is None:
            raise ValueError("it has no content")
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state["content"]


class Once(Broken):
    """A part that can be saved once: when it is checked."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        self.content = None
        return saved


def fail_while_keeping(when: str) -> None:
    state = build(broken=Once() if when == "at the beginning" else Broken())

    @survive.train(state)
    def train(world: survive.World) -> None:
        step(state)
        if when == "at a step":
            state.parts["broken"].content = threading.Lock()
        step(state)
        state.parts["broken"].content = None
        raise KeyError("the script's own")

    train()


@pytest.mark.parametrize(("when", "copied"), [("at the beginning", 0), ("at a step", 2), ("at the end", 2)])
def test_an_error_while_copying_hides_no_error_of_the_script(alone: Node, when: str, copied: int) -> None:
    [worker] = alone.run(fail_while_keeping, when)
    assert worker.exitcode == 1
    assert 'KeyError: "the script\'s own"' in worker.errors.splitlines()[-1]
    lines = [line for line in worker.errors.splitlines() if line.startswith("elastic_agent.survive: ")]
    assert len(lines) == 1
    assert f"no copies in memory from step {copied} on" in lines[0]


def begin_broken(content: str) -> str:
    broken = Broken()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    contents = {"lock": threading.Lock(), "object": broken, "sparse": torch.eye(2).to_sparse()}
    broken.content = {**contents, "quantized": quantized}[content]
    state = build(broken=broken)

    @survive.train(state)
    def train(world: survive.World) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(TypeError, match=r"survive\.State: the state of broken contains") as caught:
        train()
    return str(caught.value)


@pytest.mark.parametrize("content", ["lock", "object", "sparse", "quantized"])
@pytest.mark.parametrize("memory", [True, False])
def test_what_cannot_be_stored_is_refused_before_the_training(
    alone: Node, content: str, memory: bool
) -> None:
    [worker] = alone.run(begin_broken, content, memory=memory)
    assert worker.exitcode == 0, worker.errors
    assert "\n" not in worker.said
    is_tensor = content in ("sparse", "quantized")
    assert worker.said.endswith("expected plain tensors with data") is is_tensor
