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
    """Return what each open descriptor leads to, by its number."""
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
    """Return what the kernel says of this process, by name."""
    with open("/proc/self/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def signal_masks():
    """Return what the kernel knows of this process's signals.

    But for those of the agent, and for 32 and 33, which the C library keeps for its threads.
    """
    kernels, left_out = fields_of_status(), 0
    for signum in (32, 33, *signals_of_the_agent()):
        left_out |= 1 << (signum - 1)
    names = ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
    return {name: f"{int(kernels[name], 16) & ~left_out:016x}" for name in names}


def agents_functions():
    """The number of functions at exit that a warm worker has beside the script's."""
    return 6 * sum(type(finder).__name__ == "Preloaded" for finder in sys.meta_path)


def signals_of_the_agent():
    """Those that it documents to have workers handle: SIGRTMIN+6 and SIGURG, on which they write their stacks and
    report imports, and those of faulthandler (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV)."""
    return 34 + 6, 23, 4, 6, 7, 8, 11


masks_at_start = signal_masks()

import warnings


def filters():
    return [
        [action, str(message), category.__name__, str(module), line]
        for action, message, category, module, line in warnings.filters
    ]


filters_at_start = filters()

import locale

locale_at_start = [locale.setlocale(locale.LC_ALL), locale.getlocale()]

# From here on, imports do no harm.
import asyncio
import builtins
import ctypes
import decimal
import faulthandler
import gc
import importlib
import inspect
import json
import logging
import multiprocessing
import platform
import random
import resource
import signal
import socket
import tempfile
import threading
import time
import tracemalloc
import uuid

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
        signal.strsignal(signum) + f" {int(signum)}": handler_name(signum)
        for signum in signal.valid_signals()
        if signum not in signals_of_the_agent()
    }


def read(path):
    """A file of /proc, or why it cannot be had."""
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        return error.strerror


def status(*names):
    kernels = fields_of_status()
    return {name: kernels.get(name) for name in names}


def environment():
    return dict(os.environ)


def kernels_environment():
    with open("/proc/self/environ", "rb") as file:
        pairs = [word.partition(b"=") for word in file.read().split(b"\0") if word]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def prctl_get(option):
    """The value of a prctl that writes an int through its second argument."""
    value = ctypes.c_int()
    libc.prctl(option, ctypes.byref(value))
    return value.value


def parent_is_alive():
    return os.path.exists(f"/proc/{os.getppid()}") and os.getppid() != 1


def has_no_children():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def limits():
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def loader_facts():
    loader = main.__loader__
    source = loader.get_source(main.__spec__.name if main.__spec__ else "__main__")
    return [type(loader).__name__, loader.name, loader.path, source.splitlines()[1]]


def spec_facts():
    spec = main.__spec__
    return spec and [spec.name, spec.origin, spec.parent, spec.cached, spec.has_location]


def warn_above():
    """A warning that is to name the caller of the module must find its way whatever is above."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("from the module", stacklevel=2)
    return [str(warning.message) for warning in caught]


def loggers():
    root = logging.getLogger()
    return [
        root.level,
        root.disabled,
        [repr(handler) for handler in root.handlers],
        logging.root.manager.disable,
    ]


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


def graph_work_in_a_fork():
    return code_of_a_fork(lambda: a_small_backward()[5] == 10)


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
    """Return how many frames there are from the module's own outwards."""
    frame, depth = sys._getframe(), 0
    while frame.f_code.co_name != "<module>" or frame.f_globals is not globals():
        frame = frame.f_back
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def outermost_frames():
    return [
        [os.path.basename(frame.filename), frame.function]
        for frame in inspect.stack()[-depth_of_the_module() :]
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
    "__main__.__cached__": lambda: main.__cached__,
    "__main__.__builtins__": lambda: main.__builtins__ is builtins,
    "__main__ is the running module": lambda: vars(main) is globals(),
    "type of __main__": lambda: [type(main).__name__, repr(main)],
    "names in __main__ at the start": lambda: names_at_start,
    "names in builtins": lambda: dir(builtins),
    "sys.argv": lambda: sys.argv,
    "sys.orig_argv": lambda: sys.orig_argv,
    "sys.path": lambda: sys.path,
    "sys.meta_path": lambda: [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "sys.path_hooks": lambda: [getattr(hook, "__qualname__", str(hook)) for hook in sys.path_hooks],
    "sys.flags": lambda: str(sys.flags),
    "sys.executable": lambda: sys.executable,
    "sys.prefix and the like": lambda: [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix],
    "sys._xoptions": lambda: sys._xoptions,
    "sys.warnoptions": lambda: sys.warnoptions,
    "sys.dont_write_bytecode": lambda: [sys.dont_write_bytecode, sys.pycache_prefix],
    "warnings.filters": lambda: filters_at_start,
    "recursion limit": lambda: sys.getrecursionlimit(),
    "switch interval": lambda: sys.getswitchinterval(),
    "dlopen flags": lambda: sys.getdlopenflags(),
    "digits of an int": lambda: sys.get_int_max_str_digits(),
    "sys.excepthook": lambda: sys.excepthook is sys.__excepthook__,
    "sys.displayhook": lambda: sys.displayhook is sys.__displayhook__,
    "sys.unraisablehook": lambda: sys.unraisablehook is sys.__unraisablehook__,
    "sys.breakpointhook": lambda: sys.breakpointhook is sys.__breakpointhook__,
    "threading.excepthook": lambda: threading.excepthook is threading.__excepthook__,
    "trace and profile functions": lambda: [sys.gettrace(), sys.getprofile(), threading.gettrace()],
    "interactive names of sys": lambda: [
        n for n in ("ps1", "ps2", "last_type", "last_value") if hasattr(sys, n)
    ],
    "hooks of async generators": lambda: list(sys.get_asyncgen_hooks()),
    "exception being handled": lambda: str(sys.exc_info()),
    "sys.stdin": lambda: stream(sys.stdin),
    "sys.stdout": lambda: stream(sys.stdout),
    "sys.stderr": lambda: stream(sys.stderr),
    "standard streams are the first ones": lambda: [
        sys.stdin is sys.__stdin__,
        sys.stdout is sys.__stdout__,
        sys.stderr is sys.__stderr__,
    ],
    "encoding of file names": lambda: [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
    "locale": lambda: locale_at_start,
    "time zone": lambda: [time.tzname, time.timezone, time.localtime(0).tm_hour],
    "modules loaded at the start": lambda: modules_at_start,
    "modules of the agent": lambda: [name for name in modules_at_start if name.startswith("elastic_agent")],
    "working directory": lambda: [
        os.getcwd(),
        os.path.realpath("/proc/self/cwd"),
        os.readlink("/proc/self/root"),
    ],
    "os.environ": environment,
    "the kernel's copy of the environment": lambda: kernels_environment() == environment(),
    "getenv of C": lambda: ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p)(("getenv", libc))(
        b"RANK"
    ).decode(),
    "command line in /proc": lambda: read("/proc/self/cmdline"),
    "name of the process": lambda: read("/proc/self/comm"),
    "program in /proc": lambda: os.readlink("/proc/self/exe"),
    "resource limits": limits,
    "niceness": lambda: [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
    "CPUs it may run on": lambda: sorted(os.sched_getaffinity(0)),
    "who and what it may": lambda: status(
        "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"
    ),
    "umask": lambda: status("Umask"),
    "confinement": lambda: status("NoNewPrivs", "Seccomp", "Mems_allowed_list", "CoreDumping"),
    "out-of-memory score": lambda: read("/proc/self/oom_score_adj"),
    "core dump filter": lambda: read("/proc/self/coredump_filter"),
    "personality": lambda: read("/proc/self/personality"),
    "control group": lambda: read("/proc/self/cgroup"),
    "timer slack": lambda: read("/proc/self/timerslack_ns"),
    "may be traced and dumped": lambda: libc.prctl(3, 0, 0, 0, 0),
    "adopts orphans": lambda: prctl_get(37),
    "leads a session": lambda: os.getsid(0) == os.getpid(),
    "leads a process group": lambda: os.getpgid(0) == os.getpid(),
    "its parent is alive": parent_is_alive,
    "signal at the death of its parent": lambda: prctl_get(2),
    "has no children": has_no_children,
    "signal handlers": handlers,
    "signal masks in /proc": lambda: masks_at_start,
    "signal mask of the thread": lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "wake-up descriptor of signals": lambda: signal.set_wakeup_fd(-1),
    "timers": lambda: [signal.getitimer(timer) for timer in (0, 1, 2)],
    "open descriptors": lambda: files_at_start,
    "threads in /proc": lambda: threads_at_start,
    "threads of Python": lambda: [thread.name for thread in threading.enumerate()],
    "main thread": lambda: [
        threading.current_thread() is threading.main_thread(),
        threading.main_thread().name,
        threading.main_thread().ident == threading.get_ident(),
        threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
        type(threading.main_thread()).__name__,
        threading.main_thread().daemon,
    ],
    "name of the next thread": lambda: threading.Thread().name,
    "garbage collection": lambda: [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.garbage)],
    "callbacks of garbage collection": lambda: len(gc.callbacks),
    "faulthandler": lambda: faulthandler.is_enabled(),
    "tracemalloc": lambda: [tracemalloc.is_tracing(), tracemalloc.get_traceback_limit()],
    "asyncio policy": lambda: type(asyncio.get_event_loop_policy()).__name__,
    "running event loop": lambda: str(asyncio._get_running_loop()),
    "decimal context": lambda: repr(decimal.getcontext()),
    "context variables": lambda: len(__import__("contextvars").copy_context()),
    "logging": loggers,
    "time-out of sockets": lambda: socket.getdefaulttimeout(),
    "cached folder for temporary files": lambda: tempfile.tempdir,
    "multiprocessing": lambda: [
        multiprocessing.current_process().name,
        type(multiprocessing.current_process()).__name__,
        multiprocessing.parent_process(),
        multiprocessing.get_start_method(allow_none=True),
        multiprocessing.active_children(),
    ],
    "warning about the caller of the module": warn_above,
    "frames from the module outwards": lambda: [depth_of_the_module(), outermost_frames()],
    "platform": lambda: [platform.python_version(), platform.python_implementation(), platform.node()],
    "hash of a text": lambda: hash("elastic"),
    "random.random()": lambda: random.random(),
    "numpy.random.random()": numpy_random,
    "uuid.uuid4()": lambda: str(uuid.uuid4()),
    "uuid.uuid1()": lambda: str(uuid.uuid1()),
    "os.urandom()": lambda: os.urandom(8).hex(),
    "authentication key of multiprocessing": lambda: bytes(multiprocessing.current_process().authkey).hex(),
    "names of temporary files": names_for_temporary_files,
    "pid": lambda: [os.getpid(), int(os.readlink("/proc/self")), threading.get_native_id()],
}

AFTER_TORCH = {
    "torch: version and file": lambda: [the_torch().__version__, the_torch().__file__],
    "torch: open descriptors": open_files,
    "torch: signal handlers": handlers,
    "torch: signal masks in /proc": signal_masks,
    "torch: threads in /proc": lambda: len(os.listdir("/proc/self/task")),
    "torch: threads of Python": lambda: [thread.name for thread in threading.enumerate()],
    "torch: warnings.filters": filters,
    "torch: sys.path": lambda: sys.path,
    "torch: sys.meta_path": lambda: [
        getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path
    ],
    "torch: logging": loggers,
    "torch: functions to run at exit": lambda: __import__("atexit")._ncallbacks() - agents_functions(),
    "torch: garbage collection": lambda: [gc.isenabled(), gc.get_threshold()],
    "torch: os.environ": environment,
    "torch: start method of multiprocessing": lambda: [
        the_torch().multiprocessing.get_start_method(allow_none=True),
        the_torch().multiprocessing.get_sharing_strategy(),
    ],
    "torch: initial seed": lambda: the_torch().initial_seed(),
    "torch: first random number": lambda: the_torch().rand(1).item(),
    "torch: threads within an operation": lambda: the_torch().get_num_threads(),
    "torch: threads between operations": lambda: the_torch().get_num_interop_threads(),
    "torch: how it is parallel": lambda: the_torch().__config__.parallel_info(),
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
    "torch: a backward pass in a fork, before any here": graph_work_in_a_fork,
    "torch: a parallel operation in a fork, before any here": parallel_work_in_a_fork,
    "torch: a small backward pass": a_small_backward,
    "torch: a parallel operation": parallel_work,
    "torch: a parallel operation in a fork after that": parallel_work_in_a_later_fork,
    "torch: one more parallel operation": parallel_work,
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
