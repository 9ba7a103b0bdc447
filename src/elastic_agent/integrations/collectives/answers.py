"""The thread of a worker that answers the questions of the agent about the worker's progress.

It holds Python's lock for 0.1 ms per question, and none while it waits. It is none of the threads that
`threading` lists, and is gone in the children of a fork.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import signal
import socket
import sys
import threading
import traceback
from itertools import takewhile
from types import FrameType, TracebackType
from typing import Any

from elastic_agent.exit_note import Writer, one_line
from elastic_agent.integrations.collectives.private_names import Recorders
from elastic_agent.worker_variables import GENERATION, SLOT

DETAILS, STACKS = b"details", b"stacks"
"""The questions for all that is known, and for the stacks of all threads; any other is for the summary."""

LARGEST_ANSWER = 60_000
MOST_GROUPS = 16
"""The number of groups that are described if all would be too long for a datagram."""

_LONGEST_ERROR = 400
_DEEPEST_STACK = 60
_LONGEST_STACK = 3500
_LONGEST_STACKS = 30_000
"""Short enough for a datagram, also if all of it has to be escaped."""

_Place = tuple[FrameType, int]
"""A frame, and the number of the line that it has come to."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_STARTS_WORKERS = (os.path.join(_PACKAGE, "workers", ""), os.path.join(_PACKAGE, "__main__.py"))
"""The files of the frames in which a process forked from the spawner runs the script."""

_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = ("/site-packages/", "/dist-packages/", "/elastic_agent/")
"""Files in such folders are no scripts. (``sysconfig`` would take 2 ms to say where they are.)"""

_WAITS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/rendezvous.py",
)


class Answers:
    """The answers of this worker, from its first process group to its end."""

    def __init__(self, address: str) -> None:
        """Connect to the agent's socket, an address in the abstract namespace. Raises OSError if it is not there."""
        self._ending = False
        self._hello = {
            "slot": int(os.environ[SLOT]),
            "generation": int(os.environ[GENERATION]),
            "pid": os.getpid(),
        }
        self._recorders = Recorders()
        self._exit_note = Writer.of_worker(os.environ)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # A socket that is connected takes messages of its peer only.
        self._socket.bind("")
        self._socket.connect("\0" + address)

    def start(self) -> None:
        """Tell the agent that it may ask."""
        self._socket.send(json.dumps(self._hello).encode())
        # Python would end a thread that returns from C while the interpreter is finalized, in the middle of torch's.
        atexit.register(self._end)
        # A signal to the process that the script's own threads block must stay pending for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._answer, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._tell_if_the_script_fails()

    @property
    def generation(self) -> int:
        """The generation in which the agent may ask."""
        return self._hello["generation"]

    def enter(self, generation: int) -> None:
        """Tell the agent that it may ask in this generation, too, in which a worker of an earlier one goes on."""
        if generation != self._hello["generation"]:
            self._hello["generation"] = generation
            self._socket.send(json.dumps(self._hello).encode())

    def tell_meeting_file(self, path: str) -> None:
        """Tell the agent over which file the ranks meet: what killed ones leave in it misleads the next."""
        self._socket.send(json.dumps({**self._hello, "meeting_file": path}).encode(), socket.MSG_DONTWAIT)

    def _tell_if_the_script_fails(self) -> None:
        """Send the last collectives when an exception ends the script: those of others may show which rank is wrong."""
        report = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            try:
                if os.getpid() == self._hello["pid"]:
                    place = self._place(list(traceback.walk_tb(trace))[: -_DEEPEST_STACK - 1 : -1])
                    last = {"groups": self._recorders.details(), "details": True, "is_last": True, **place}
                    self._socket.send(self._encoded(last), socket.MSG_DONTWAIT)
            except Exception:  # never the script's problem
                pass
            report(kind, error, trace)

        sys.excepthook = hook

    def _end(self) -> None:
        self._ending = True
        if self._exit_note is not None:  # a worker that was forked has noted more before
            error = getattr(sys, "last_value", None)  # none after sys.exit, whose code is not known here
            self._exit_note.write(error, 1 if error is not None else None)

    def _answer(self) -> None:
        while True:
            try:
                question = self._socket.recv(64)
                if self._ending:
                    return
                if question == STACKS:
                    self._socket.send(json.dumps({**self._hello, "stacks": _stacks()}).encode())
                    continue
                self._socket.send(
                    self._encoded(
                        self._details() if question == DETAILS else {"groups": self._recorders.summary()}
                    )
                )
            except OSError:  # the agent is gone, and this worker soon
                return
            except Exception:  # never the script's problem
                continue

    def _encoded(self, answer: dict[str, Any]) -> bytes:
        data = json.dumps({**self._hello, **answer}).encode()
        if len(data) <= LARGEST_ANSWER:
            return data
        # A worker of very many groups: those that wait are worth most.
        groups = [group for group in answer["groups"] if group["enqueued"] > group["completed"]]
        return json.dumps({**self._hello, **answer, "groups": groups[:MOST_GROUPS]}).encode()

    def _details(self) -> dict[str, Any]:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        frames: list[_Place] = []
        while main is not None and len(frames) < _DEEPEST_STACK:
            frames.append((main, main.f_lineno))
            main = main.f_back
        return {
            "groups": self._recorders.details(),
            "details": True,
            **self._place(frames),
            **self._handled(),
        }

    def _place(self, frames: list[_Place]) -> dict[str, str]:
        """Describe where the main thread is; ``frames``: the innermost first."""
        frames = list(
            takewhile(lambda place: not place[0].f_code.co_filename.startswith(_STARTS_WORKERS), frames)
        )
        lines = [f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in frames]
        places = ((frame.f_code.co_filename, line) for frame, line in frames)
        own = next((place for place in places if _is_script(place[0])), None)
        stack: list[str] = []
        for line in lines:
            if sum(map(len, stack)) + len(line) > _LONGEST_STACK:
                break
            stack.append(line)
        return {
            "line": f"{os.path.basename(own[0])}:{own[1]}" if own is not None else "",
            "waits_in": _waits_in([frame for frame, _ in frames]),
            "stack": "\n".join(reversed(stack)),
        }

    def _handled(self) -> dict[str, str]:
        """Describe the exception that the main thread handles, in an `except`, a `finally` or at a `with`."""
        found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
        error = found[1] if isinstance(found, tuple) else found  # Python 3.11 has them as sys.exc_info()
        if not isinstance(error, BaseException):
            return {}
        places = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
        own = [f"{os.path.basename(path)}:{line}" for path, line in places if _is_script(path)]
        return {"handles": one_line(error)[:_LONGEST_ERROR], "raised_at": own[-1] if own else ""}


def _stacks() -> str:
    """Return the stacks of all threads as faulthandler writes them: the last call first, the main thread last."""
    main, text = threading.main_thread().ident, ""
    for thread, frame in sorted(sys._current_frames().items(), key=lambda found: found[0] == main):
        text += f"Thread {thread:#018x} (most recent call first):\n"
        for at, line in list(traceback.walk_stack(frame))[:_DEEPEST_STACK]:
            text += f'  File "{at.f_code.co_filename}", line {line} in {at.f_code.co_name}\n'
    return text[-_LONGEST_STACKS:]


def _is_script(path: str) -> bool:
    return not path.startswith((_STANDARD_LIBRARY, "<")) and not any(folder in path for folder in _INSTALLED)


def _waits_in(frames: list[FrameType]) -> str:
    """Return the function of `torch.distributed` that the innermost frames are of, as the script called it."""
    name = ""
    for frame in frames:
        if not frame.f_code.co_filename.endswith(_WAITS):
            break
        if frame.f_code.co_name not in ("wrapper", "<module>"):
            name = frame.f_code.co_name
    return name
