# ruff: noqa: E402
"""Writes down all that a script can see of the process it runs in.

One JSON file for each worker and attempt, in the folder that CONFORMANCE_FOLDER names; item by item, in the
order of the tables at the end. What imports change is looked at in the first lines, before there are any.
"""

names_at_start = dir()

import sys

modules_at_start = sorted(sys.modules)

import os

threads_at_start = len(os.listdir("/proc/self/task"))


def open_files():
    """What each open descriptor leads to, by its number."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that listed the folder
            continue
        found[fd] = os.path.basename(target)
    return dict(sorted(found.items()))


files_at_start = open_files()


def fields_of_status():
    """What the kernel says of this process, by name."""
    with open("/proc/self/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def signal_masks():
    """What the kernel knows of this process's signals.

    But for those of the agent, and for 32 and 33, which the C library keeps for its threads.
    """
    kernels, left_out = fields_of_status(), 0
    for one in (32, 33, *signals_of_the_agent()):
        left_out |= 1 << (one - 1)
    names = ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
    return {name: f"{int(kernels[name], 16) & ~left_out:016x}" for name in names}


def signals_of_the_agent():
    """Those that it documents to have workers handle: SIGRTMIN+6 and SIGURG, on which they write their stacks and
    report imports, and those of faulthandler (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV)."""
    return 34 + 6, 23, 4, 6, 7, 8, 11


masks_at_start = signal_masks()

# From here on, imports do no harm.
import builtins
import ctypes
import faulthandler
import gc
import importlib
import inspect
import json
import multiprocessing
import random
import signal
import tempfile
import threading
import time

main = sys.modules["__main__"]
libc = ctypes.CDLL(None, use_errno=True)


def stream(file):
    """All that tells one standard stream from another."""
    names = ("name", "mode", "encoding", "errors", "line_buffering", "write_through", "newlines", "closed")
    told = {name: getattr(file, name) for name in names}
    return {
        **told,
        "type": type(file).__name__,
        "buffer": type(file.buffer).__name__,
        "raw": type(getattr(file.buffer, "raw", None)).__name__,
        "isatty": file.isatty(),
        "fileno": file.fileno(),
    }


def handler_name(signum):
    handler = signal.getsignal(signum)
    return getattr(handler, "__qualname__", None) or str(handler)


def handlers():
    return {
        signal.strsignal(one) + f" {int(one)}": handler_name(one)
        for one in signal.valid_signals()
        if one not in signals_of_the_agent()
    }


def read(path):
    """A file of /proc, or why it cannot be had."""
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        return error.strerror


def environment():
    return dict(os.environ)


def kernels_environment():
    with open("/proc/self/environ", "rb") as file:
        pairs = [one.partition(b"=") for one in file.read().split(b"\0") if one]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def prctl_get(option):
    """The value of a prctl that writes an int through its second argument."""
    value = ctypes.c_int()
    libc.prctl(option, ctypes.byref(value))
    return value.value


def parent_is_alive():
    return os.path.exists(f"/proc/{os.getppid()}") and os.getppid() != 1


def loader_facts():
    loader = main.__loader__
    source = loader.get_source(main.__spec__.name if main.__spec__ else "__main__")
    return [type(loader).__name__, loader.name, loader.path, source.splitlines()[1]]


def spec_facts():
    spec = main.__spec__
    return spec and [spec.name, spec.origin, spec.parent, spec.cached, spec.has_location]


def names_for_temporary_files():
    return [next(tempfile._get_candidate_names()), os.path.basename(tempfile.mktemp())]


def numpy_random():
    return importlib.import_module("numpy").random.random()


def the_torch():
    return importlib.import_module("torch")


def a_small_backward():
    torch = the_torch()
    x = torch.arange(6.0, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.tolist()


def parallel_work():
    """Enough for every thread of OpenMP's pool."""
    torch = the_torch()
    a = torch.ones(600, 600)
    return [
        (a @ a).sum().item(),
        torch.ones(4_000_000).sum().item(),
        torch.sigmoid(torch.zeros(3_000_000)).sum().item(),
    ]


def parallel_work_in_a_fork():
    """The same in a child of this process."""
    return code_of_a_fork(lambda: parallel_work()[1] == 4_000_000)


def parallel_work_in_a_later_fork():
    """In a child forked once this process has used its pool of threads."""
    if the_torch().get_num_threads() > 1:
        return "not tried: it hangs in a fork of bare Python (GNU OpenMP)"
    return parallel_work_in_a_fork()


def code_of_a_fork(works):
    """0 if it works, 1 if the result is wrong, 2 if it raises, -14 if it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        try:
            os._exit(0 if works() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def depth_of_the_module():
    """How many frames there are from the module's own outwards."""
    frame, depth = sys._getframe(), 0
    while frame.f_code.co_name != "<module>" or frame.f_globals is not globals():
        frame = frame.f_back
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def outermost_frames():
    return [
        [os.path.basename(one.filename), one.function] for one in inspect.stack()[-depth_of_the_module() :]
    ]


def file_of_main():
    return [main.__file__, os.path.isabs(main.__file__)]


AT_START = {
    "__main__.__name__": lambda: main.__name__,
    "__main__.__file__": file_of_main,
    "__main__.__spec__": spec_facts,
    "__main__.__package__": lambda: main.__package__,
    "__main__.__loader__": loader_facts,
    "__main__.__doc__": lambda: main.__doc__,
    "__main__.__builtins__": lambda: main.__builtins__ is builtins,
    "__main__ is the running module": lambda: vars(main) is globals(),
    "type of __main__": lambda: [type(main).__name__, repr(main)],
    "names in __main__ at the start": lambda: names_at_start,
    "sys.argv": lambda: sys.argv,
    "sys.orig_argv": lambda: sys.orig_argv,
    "sys.path": lambda: sys.path,
    "sys.meta_path": lambda: [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
    "sys.flags": lambda: str(sys.flags),
    "sys.excepthook": lambda: sys.excepthook is sys.__excepthook__,
    "exception being handled": lambda: str(sys.exc_info()),
    "sys.stdin": lambda: stream(sys.stdin),
    "sys.stdout": lambda: stream(sys.stdout),
    "sys.stderr": lambda: stream(sys.stderr),
    "standard streams are the first ones": lambda: [
        sys.stdin is sys.__stdin__,
        sys.stdout is sys.__stdout__,
        sys.stderr is sys.__stderr__,
    ],
    "time zone": lambda: [time.tzname, time.timezone, time.localtime(0).tm_hour],
    "modules loaded at the start": lambda: modules_at_start,
    "os.environ": environment,
    "the kernel's copy of the environment": lambda: kernels_environment() == environment(),
    "command line in /proc": lambda: read("/proc/self/cmdline"),
    "name of the process": lambda: read("/proc/self/comm"),
    "leads a session": lambda: os.getsid(0) == os.getpid(),
    "leads a process group": lambda: os.getpgid(0) == os.getpid(),
    "its parent is alive": parent_is_alive,
    "signal at the death of its parent": lambda: prctl_get(2),
    "signal handlers": handlers,
    "signal masks in /proc": lambda: masks_at_start,
    "signal mask of the thread": lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "open descriptors": lambda: files_at_start,
    "threads in /proc": lambda: threads_at_start,
    "main thread": lambda: [
        threading.current_thread() is threading.main_thread(),
        threading.main_thread().name,
        threading.main_thread().ident == threading.get_ident(),
        threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
        type(threading.main_thread()).__name__,
        threading.main_thread().daemon,
    ],
    "garbage collection": lambda: [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.garbage)],
    "faulthandler": lambda: faulthandler.is_enabled(),
    "cached folder for temporary files": lambda: tempfile.tempdir,
    "multiprocessing": lambda: [
        multiprocessing.current_process().name,
        type(multiprocessing.current_process()).__name__,
        multiprocessing.parent_process(),
        multiprocessing.get_start_method(allow_none=True),
        multiprocessing.active_children(),
    ],
    "frames from the module outwards": lambda: [depth_of_the_module(), outermost_frames()],
    "hash of a text": lambda: hash("elastic"),
    "random.random()": lambda: random.random(),
    "numpy.random.random()": numpy_random,
    "authentication key of multiprocessing": lambda: bytes(multiprocessing.current_process().authkey).hex(),
    "names of temporary files": names_for_temporary_files,
    "pid": lambda: [os.getpid(), int(os.readlink("/proc/self")), threading.get_native_id()],
}

AFTER_TORCH = {
    "torch: open descriptors": open_files,
    "torch: signal masks in /proc": signal_masks,
    "torch: threads in /proc": lambda: len(os.listdir("/proc/self/task")),
    "torch: os.environ": environment,
    "torch: initial seed": lambda: the_torch().initial_seed(),
    "torch: first random number": lambda: the_torch().rand(1).item(),
    "torch: threads within an operation": lambda: the_torch().get_num_threads(),
    "torch: threads between operations": lambda: the_torch().get_num_interop_threads(),
    "torch: CUDA": lambda: [
        the_torch().cuda._is_in_bad_fork(),
        the_torch().cuda.is_initialized(),
        the_torch().cuda.is_available(),
        the_torch().cuda.device_count(),
    ],
    "torch: defaults": lambda: [
        str(the_torch().get_default_dtype()),
        str(the_torch().get_default_device()),
        the_torch().is_grad_enabled(),
        the_torch().is_anomaly_enabled(),
        the_torch().are_deterministic_algorithms_enabled(),
    ],
    "torch: distributed": lambda: [
        the_torch().distributed.is_initialized(),
        the_torch().distributed.is_torchelastic_launched(),
    ],
    "torch: operators it knows": lambda: len(the_torch()._C._dispatch_get_all_op_names()),
    "torch: a parallel operation in a fork, before any here": parallel_work_in_a_fork,
    "torch: a small backward pass": a_small_backward,
    "torch: a parallel operation": parallel_work,
    "torch: a parallel operation in a fork after that": parallel_work_in_a_later_fork,
}


def look(looker):
    try:
        return looker()
    except Exception as error:
        return {"the probe failed": f"{type(error).__name__}: {error}"}


def report():
    found = {name: look(looker) for name, looker in AT_START.items()}
    importlib.import_module("torch")
    found |= {name: look(looker) for name, looker in AFTER_TORCH.items()}
    with open(os.path.join(folder, f"report-{attempt}-{rank}.json"), "w") as file:
        json.dump(found, file, default=str)


folder = os.environ["CONFORMANCE_FOLDER"]
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
report()
if attempt == "0":
    # It is to fail, so that there is a second attempt, but not before both ranks have reported.
    with open(os.path.join(folder, "gate"), "r" if rank == "0" else "w") as gate:
        sys.exit(1 if rank == "0" and gate.read() == "" else 0)
