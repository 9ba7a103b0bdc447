"""Ways in which a worker ends, one a run: which of those in the first argument, its place among them says.

A list that begins with "slots:" gives one to each worker of an attempt; one that begins with "attempts:", one
to each attempt. The names are the functions'.
"""

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings

ways = {}


def succeeds(function):
    """The worker ends with code 0; all of these run at once, each in a slot of its own."""
    ways[function.__name__] = function
    return function


def fails(function):
    """The worker ends with another code; one attempt after the other."""
    ways[function.__name__] = function
    return function


def say(*words):
    print(*words)


class Point:
    """Defined in ``__main__``, to be pickled."""

    def __init__(self, x):
        self.x = x


class Noisy:
    """Complains when it goes."""

    def __del__(self):
        raise RuntimeError("from __del__")


def there_and_back():
    return pickle.loads(pickle.dumps(Point(3))).x, pickle.dumps(Point(3))


kept = []
"""What is to live until the interpreter ends."""


# Code 0.


@succeeds
def falls_off_the_end():
    say("done")


@succeeds
def raises_at_exit():
    atexit.register(say, "runs after the one that raises")
    atexit.register(lambda: 1 / 0)


@succeeds
def raises_in_a_finalizer_at_exit():
    kept.append(Noisy())


@succeeds
def does_not_wait_for_a_daemon_thread():
    started = threading.Event()

    def work():
        started.set()
        time.sleep(1000)

    threading.Thread(target=work, daemon=True).start()
    started.wait()


@succeeds
def pickles_its_own_class_in_a_thread_that_outlives_the_script():
    def work():
        threading.main_thread().join()
        say(there_and_back(), sys.modules["__main__"].__dict__ is globals(), __name__)

    threading.Thread(target=work).start()


@succeeds
def uses_its_names_in_a_finalizer_after_an_import_of_torch():
    import torch  # modules that torch imports refer to the main module

    class Last:
        def __del__(self):
            say("names are there:", Point is not None, sys is not None)

    kept.append(Last())
    say(torch.ones(1))


@succeeds
def flushes_what_is_in_buffers():
    file = open(os.dup(1), "w", buffering=8192)  # noqa: SIM115
    kept.append(file)
    file.write("written without a flush")


@succeeds
def shows_at_once_what_it_prints():
    before = os.fstat(1).st_size
    print("a word", end="")
    say(os.fstat(1).st_size - before)
    before = os.fstat(2).st_size
    print("a word", end="", file=sys.stderr)
    say(os.fstat(2).st_size - before)


@succeeds
def reads_the_end_of_its_input():
    try:
        input("a question? ")
    except EOFError as error:
        say("EOFError", error, repr(sys.stdin.read()))


@succeeds
def warns():
    warnings.warn("of itself", stacklevel=1)
    warnings.warn("of its caller", stacklevel=2)
    warnings.warn("of what is going", DeprecationWarning, stacklevel=1)


@succeeds
def handles_sigterm_during_sleep():
    def handler(signum, frame):
        say("got", signal.Signals(signum).name, threading.current_thread().name, frame is not None)
        raise TimeoutError

    signal.signal(signal.SIGTERM, handler)
    with contextlib.suppress(TimeoutError):
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
        time.sleep(1000)


@succeeds
def forks():
    print("before, without a line's end", end="")
    pid = os.fork()
    if pid == 0:
        say(" in the child", threading.current_thread() is threading.main_thread())
        sys.exit(9)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@succeeds
def starts_python_with_its_own_options():
    say(subprocess._args_from_interpreter_flags())


@succeeds
def becomes_another_program():
    os.execlp(
        "sh", "sh", "-c", "echo another; grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; ls /proc/self/fd"
    )


@succeeds
def closes_its_streams():
    sys.stdout.close()
    os.close(0)


# Other codes.


@fails
def exits_with_3():
    sys.exit(3)


@fails
def exits_with_a_text():
    sys.exit("a text for stderr: ü")


@fails
def exits_at_once():
    atexit.register(say, "never said")
    print("unfinished", end="")
    os._exit(7)


@fails
def raises():
    raise ValueError("an uncaught exception, with ü and\na second line")


@fails
def raises_in_compiled_text():
    exec(compile("x = 1\n1 / 0\n", "<text>", "exec"))


@fails
def is_interrupted_by_a_signal():
    atexit.register(say, "at exit")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1000)


@fails
def is_terminated():
    atexit.register(say, "never said")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)


@fails
def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


@fails
def aborts():
    os.abort()


@fails
def has_an_excepthook_with_the_whole_story():
    import traceback

    def hook(kind, error, trace):
        say("".join(traceback.format_exception(kind, error, trace)))
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
    raise ValueError("for the hook")


@fails
def cannot_write_its_output():
    sys.stdout = open("/dev/full", "w")  # noqa: SIM115
    print("lost")


chosen, _, names = sys.argv[1].partition(":")
place = int(os.environ["LOCAL_RANK" if chosen == "slots" else "TORCHELASTIC_RESTART_COUNT"])
ways[names.split(",")[place]]()
