"""Implements :func:`elastic_agent.survive.train`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.amp import GradScaler
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elastic_agent import client
from elastic_agent.survive._agreement import begin
from elastic_agent.survive._copies import Copies, say
from elastic_agent.survive._memory import Memory
from elastic_agent.survive._sockets import Sockets, open_sockets
from elastic_agent.survive._state import State
from elastic_agent.survive._survivor import Survivor, is_apart, keeps_gpus
from elastic_agent.worker_variables import PARKING, SURVIVE_GPU

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_calls: Counter[str] = Counter()
"""How often this process has called each function: its second training is not the first one."""


_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Otherwise threads of torch end this process when another worker is lost, or wait for what other ranks have to say."""


class World:
    """The workers that train together, and this one's place among them; valid during one call."""

    def __init__(self, training: str, survivor: Survivor | None = None) -> None:
        placement = client.current().placement
        is_initialized = dist.is_initialized()
        self.rank: int = dist.get_rank() if is_initialized else placement.rank
        """The number of this worker, from 0."""
        self.world_size: int = dist.get_world_size() if is_initialized else placement.world_size
        """The number of workers."""
        has_gpu = torch.cuda.device_count() > placement.local_rank
        self.device: torch.device = torch.device(f"cuda:{placement.local_rank}" if has_gpu else "cpu")
        """The GPU with the number of the local rank (with --virtual-local-rank: 0) if there is one; else the CPU."""
        self._training = training
        self._made_group = False
        self._survivor = survivor
        self._connections: Sockets = {}

    def ddp(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        """Return the model in ``DistributedDataParallel(model, **options)``.

        If the script has not initialised the default process group, this does: with NCCL for GPUs, else with gloo.
        """
        if not dist.is_initialized():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                if self._survivor is not None:
                    os.environ.update(_NCCL | os.environ)
            before = open_sockets() if self._survivor is not None else {}
            self._init("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo", "training")
            self._made_group = True
            if self._survivor is not None:
                self._connections = dict(open_sockets().items() - before.items())
        made = DistributedDataParallel(model, **options)
        if self._survivor is not None and self._made_group:
            self._survivor.made(made, self._connections)
        return made

    def begin(self, state: State, memory: Memory | None, layout: bytes) -> None:
        """Give the state of all workers the newest values."""
        if self.world_size == 1:
            begin(state, memory, layout, 1)
            return
        # Destroyed after this, so that the script may still make a default process group of its own.
        if not dist.is_initialized():
            self._init("gloo", "state")
            group = None
        else:
            group = dist.new_group(backend="gloo")
        begin(state, memory, layout, self.world_size, group)
        dist.destroy_process_group(group)

    def close(self) -> None:
        """End the process group that :meth:`ddp` has made."""
        if self._survivor is not None:
            self._survivor.release_group()
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()

    def _init(self, backend: str, purpose: str) -> None:
        if "RANK" in os.environ:
            store, _, _ = next(rendezvous("env://"))
        else:
            store = HashStore()
        # The keys of a process group repeat when there is another one after it: torch counts from 0 again.
        own = PrefixStore(f"elastic_agent.survive/{self._training}/{purpose}", store)
        dist.init_process_group(backend, store=own, rank=self.rank, world_size=self.world_size)


def train(
    state: State,
) -> Callable[[Callable[Concatenate[World, _Parameters], _Result]], Callable[_Parameters, _Result]]:
    """Have a function train with the newest state that a worker of this run has.

        @survive.train(state)
        def train(world):
            ddp = world.ddp(model)
            while state.step < steps:
                ...
                optimizer.step()
                state.step += 1

        train()

    Each call of the decorated function is one training. First, on every rank, the state becomes the newest one: that of
    the checkpoint which :meth:`State.load` named, or of a copy in memory that is newer. Then the function is called
    once, with a :class:`World` before the arguments. What it returns or raises passes through.

    Under elastic-agent, the state is copied to memory that the agent holds: at step boundaries, and when the function
    ends or fails, or SIGTERM arrives, while the state is at one. Under torchrun and plain python there are no copies.

    Raises:
        TypeError: the state of a part cannot be stored.
        RuntimeError: a training with this state runs already, or the states of two ranks differ in their parts.
    """

    def decorate(
        function: Callable[Concatenate[World, _Parameters], _Result],
    ) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def run(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            return _run(state, function, lambda world: function(world, *arguments, **named))

        return run

    return decorate


def _run(state: State, function: Callable[..., Any], call: Callable[[World], _Result]) -> _Result:
    if state.on_step is not None:
        raise RuntimeError(
            "survive.train: a training with this state runs already; expected a State for each"
        )
    name = f"{function.__module__}.{function.__qualname__}"
    training = f"{name}/{_calls[name]}"
    _calls[name] += 1
    layout = state.layout()
    memory = None if state.copy_every_s is None else _open_memory(training, layout)
    # Workers that are started again come through the trainings before this one; a scaler keeps more than its state.
    can_outlive = memory is not None and _calls.total() == 1
    can_outlive &= not any(isinstance(part, GradScaler) for part in state.parts.values())
    # Without an optimizer, nothing says at which step the parameters are.
    can_outlive &= any(isinstance(part, Optimizer) for part in state.parts.values())
    survivor = Survivor.of_worker() if can_outlive else None
    if survivor is None:
        if is_apart():
            raise SystemExit(
                "elastic_agent.survive: this worker cannot keep its process: it may use a GPU, has had a process group "
                "or a training before, has a GradScaler, no optimizer or no copies in its state, or trains outside the "
                "main thread"
            )
        world = World(training)
        is_gpu = torch.cuda.is_available() and not keeps_gpus()
        if PARKING in os.environ and is_gpu and world.rank == 0:
            say(
                "--survive keep is for CPUs: workers that may use a GPU are started again, with their state from "
                f"memory ({SURVIVE_GPU}=1 keeps them, too, which has not been tried on a GPU yet)"
            )
        return _train(world, state, memory, layout, call)
    with contextlib.closing(survivor):
        if is_apart():
            survivor.await_world()
        while True:
            state.load_newer()
            with contextlib.suppress(_WorldIsOverError):
                return _train(World(training, survivor), state, memory, layout, call, survivor)


class _WorldIsOverError(Exception):
    """This worker has left its world, and trains on in the next one."""


def _train(
    world: World,
    state: State,
    memory: Memory | None,
    layout: bytes,
    call: Callable[[World], _Result],
    survivor: Survivor | None = None,
) -> _Result:
    """Train in one world."""
    world.begin(state, memory, layout)
    if memory is not None:
        result = _call_with_copies(Copies(state, memory, survivor), lambda: call(world), survivor)
    else:
        result = call(world)
    world.close()
    return result


def _call_with_copies(copies: Copies, call: Callable[[], _Result], survivor: Survivor | None) -> _Result:
    with contextlib.closing(copies), _CopyOnSigterm(copies.keep_at_sigterm):
        try:
            result = call()
            copies.leave_if_aborted()
        except BaseException as error:
            is_whole = copies.is_at_boundary
            if survivor is not None and is_whole and survivor.outlives(error, copies.rewind):
                raise _WorldIsOverError from None
            copies.keep_after(error)
            raise
        copies.keep()
        return result


def _open_memory(training: str, layout: bytes) -> Memory | None:
    """Return the agent's memory for this training, without what another one has left in it."""
    me = client.current()
    main = getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]
    names = (me.run_id, os.path.realpath(main), training)
    identity = hashlib.sha256("\0".join(names).encode() + layout).digest()
    try:
        memory = Memory.of_worker(identity, me.placement.local_world_size)
        if memory is not None and memory.belongs_to_another():
            if _calls.total() == 1:  # else it may be an earlier training of this process
                say(
                    "the state in memory is not used: it is of another training, or its model had other shapes"
                )
            memory.clear()
    except OSError as error:
        say(f"no copies in memory: {error}")
        return None
    return memory


class _CopyOnSigterm:
    """Copies the state when SIGTERM arrives, and then does what the process would have done without it."""

    def __init__(self, keep: Callable[[], None]) -> None:
        self._keep: Callable[[], None] | None = keep
        self._earlier: Callable[[int, FrameType | None], Any] | int | None = None

    def __enter__(self) -> None:
        self._earlier = signal.getsignal(signal.SIGTERM)
        # None: the handler was not installed by Python, which could not install it again.
        if threading.current_thread() is not threading.main_thread() or self._earlier is None:
            return
        signal.signal(signal.SIGTERM, self._arrived)
        os.register_at_fork(after_in_child=self._remove)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        """Install the earlier handler, unless the script has installed another one since; also in a forked child."""
        self._keep = None
        if signal.getsignal(signal.SIGTERM) == self._arrived:
            signal.signal(signal.SIGTERM, self._earlier)

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        if self._keep is not None:
            self._keep()
        if callable(self._earlier):
            self._earlier(signum, frame)
        elif self._earlier == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
