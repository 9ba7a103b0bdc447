"""Runs a training script in a worker, unchanged, and records what it does.

    python observer.py FOLDER train.py --epochs 3
    python observer.py FOLDER -m package.train

Appends JSON lines to ``FOLDER/records.jsonl``: each optimizer step with the loss that ``backward()`` was called on and
a fingerprint of the parameters, each ``torch.save`` and ``torch.load``, each step reported with ``client.heartbeat``.
The fingerprint shows which state training continues from after a restart, whatever the script calls its steps.

If the file ``FOLDER/die-saving`` exists, the next worker that saves dies halfway.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_agent import client, worker_variables

PARAMETERS = 8
"""So many parameters of a model, and so many numbers of each, make its fingerprint."""
NUMBERS = 16
ERROR_CHARACTERS = 100


class Recorder:
    """Writes lines about this worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        me = client.current()
        self._who = {
            "worker": me.worker_id,
            "node": me.node_id,
            "generation": me.placement.generation,
            "rank": me.placement.rank,
            "world": me.placement.world_size,
            "pid": os.getpid(),
        }

    def write(self, kind: str, **line: object) -> None:
        """Write one line with one call: many processes share the file."""
        stamped = {"boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME), "kind": kind, **self._who, **line}
        handle = os.open(self.folder / "records.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(handle, (json.dumps(stamped) + "\n").encode())
        os.close(handle)


class Steps:
    """Steps of the first optimizer that makes one.

    torch calls the hooks once more for each ``super().step()`` of a subclass: a step begins with the first of these
    calls, and its parameters are those after the last one.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first: int | None = None
        self._taken = 0
        self._is_begun = False
        """A call of ``step`` has not returned yet, or has raised an error."""
        self.loss: Any = None
        """The newest scalar that ``backward()`` was called on."""

    def before(self, optimizer: Any, *_: object) -> None:
        """Record the state that training begins with."""
        if self._first is None:
            self._first = id(optimizer)
            self._recorder.write("begin", state=fingerprint(optimizer))
        self._is_begun = self._is_begun or id(optimizer) == self._first

    def after(self, optimizer: Any, *_: object) -> None:
        """Record a step, or what a subclass adds to it."""
        if id(optimizer) != self._first:
            return
        if not self._is_begun:
            self._recorder.write("stepped", taken=self._taken, state=fingerprint(optimizer))
            return
        self._is_begun = False
        self._taken += 1
        loss = None if self.loss is None else float(self.loss)
        self._recorder.write("step", taken=self._taken, state=fingerprint(optimizer), loss=loss)


def fingerprint(optimizer: Any) -> str:
    """Return a text that is the same for the same values of the parameters; empty if they cannot be read."""
    digest = hashlib.blake2b(digest_size=8)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for parameter in every[: PARAMETERS // 2] + every[PARAMETERS // 2 :][-PARAMETERS // 2 :]:
            flat = parameter.detach().reshape(-1)
            digest.update(repr(flat[:: max(1, flat.numel() // NUMBERS)][:NUMBERS].tolist()).encode())
    except Exception:  # a type of tensor that has no such view
        return ""
    return digest.hexdigest()


def watch_torch(recorder: Recorder) -> None:
    """Record optimizer steps, saves and loads."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    steps = Steps(recorder)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
    backward, save, load = torch.Tensor.backward, torch.save, torch.load

    def recorded_backward(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.numel() == 1:
            steps.loss = self.detach()
        return backward(self, *arguments, **named)  # type: ignore[no-untyped-call]

    def recorded_save(obj: object, f: Any, *arguments: Any, **named: Any) -> None:
        _save(recorder, lambda where: save(obj, where, *arguments, **named), f)

    def recorded_load(f: Any, *arguments: Any, **named: Any) -> Any:
        try:
            found = load(f, *arguments, **named)
        except Exception as error:
            recorder.write("load", path=_path(f), error=f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS])
            raise
        recorder.write("load", path=_path(f), error=None)
        return found

    torch.Tensor.backward = recorded_backward  # type: ignore[method-assign]
    torch.save, torch.load = recorded_save, recorded_load


def _save(recorder: Recorder, save: Callable[[Any], object], f: Any) -> None:
    path = _path(f)
    recorder.write("saving", path=path)
    try:
        (recorder.folder / "die-saving").unlink()  # one process alone can
    except FileNotFoundError:
        save(f)
        recorder.write("saved", path=path)
        return
    # Leave what a power cut or SIGKILL in the middle of a save would: the first half of the file.
    whole = io.BytesIO()
    save(whole)
    half = whole.getvalue()[: whole.tell() // 2]
    if hasattr(f, "write"):
        f.write(half)
        f.flush()
    else:
        Path(path).write_bytes(half)
    recorder.write("killed_saving", path=path)
    os.kill(os.getpid(), signal.SIGKILL)


def _path(f: Any) -> str:
    """Return the real path of what a script passes to torch.save; empty if that is no file."""
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", "")
    return os.path.realpath(os.fsdecode(name)) if isinstance(name, (str, bytes, os.PathLike)) and name else ""


def watch_heartbeats(recorder: Recorder) -> None:
    """Record the steps that the script, or the integration of a framework, reports."""

    def recorded(report: Callable[[Any], None]) -> Callable[..., None]:
        def write(step: int | None = None) -> None:
            report(step)
            recorder.write("beat", step=step)

        return write

    client.heartbeat, client.report_step = recorded(client.heartbeat), recorded(client.report_step)


def main() -> None:
    """Run the script as ``python`` would."""
    folder, *command = sys.argv[1:]
    recorder = Recorder(Path(folder))
    me = client.current()
    recorder.write(
        "born",
        run=me.run_id,
        local_rank=me.placement.local_rank,
        node_rank=me.placement.node_rank,
        heartbeat_file=os.environ.get(worker_variables.HEARTBEAT),
        temp=os.environ.get("TMPDIR"),
    )
    watch_heartbeats(recorder)
    is_module = command[0] == "-m"
    script = command[1] if is_module else command[0]
    if is_module or "torch" in sys.modules or "torch" in Path(script).read_text(errors="replace"):
        watch_torch(recorder)
    sys.argv = command[1:] if is_module else command
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")
    recorder.write("finished")


if __name__ == "__main__":
    main()
