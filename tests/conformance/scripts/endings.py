"""Ways in which a worker ends, one a run: which of those in the first argument, its place among them says.

A list that begins with "slots:" gives one to each worker of an attempt; one that begins with "attempts:", one
to each attempt. The names are the functions'.
"""

import asyncio
import atexit
import contextlib
import logging
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
def exits_with_none():
    sys.exit(None)


@succeeds
def exits_with_0():
    sys.exit(0)


@succeeds
def calls_the_exit_of_site():
    exit()


@succeeds
def runs_functions_at_exit_in_their_order():
    for number in range(3):
        atexit.register(say, "registered as", number)


@succeeds
def raises_at_exit():
    atexit.register(say, "runs after the one that raises")
    atexit.register(lambda: 1 / 0)


@succeeds
def registers_at_exit_at_exit():
    atexit.register(lambda: atexit.register(say, "registered late"))


@succeeds
def raises_in_a_finalizer_at_exit():
    kept.append(Noisy())


@succeeds
def raises_in_a_finalizer_before():
    Noisy()


@succeeds
def exits_in_a_thread():
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    say("the process goes on")


@succeeds
def raises_in_a_thread():
    def work():
        raise ValueError("in a thread")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@succeeds
def waits_for_a_thread_that_outlives_the_script():
    def work():
        threading.main_thread().join()  # returns once the script is through
        say("the thread is through")

    atexit.register(say, "at exit")
    threading.Thread(target=work).start()
    say("the script is through")


@succeeds
def does_not_wait_for_a_daemon_thread():
    started = threading.Event()

    def work():
        started.set()
        time.sleep(1000)

    threading.Thread(target=work, daemon=True).start()
    started.wait()


@succeeds
def pickles_its_own_class_at_exit():
    atexit.register(lambda: say(there_and_back()))


@succeeds
def pickles_its_own_class_in_a_thread_that_outlives_the_script():
    def work():
        threading.main_thread().join()
        say(there_and_back(), sys.modules["__main__"].__dict__ is globals(), __name__)

    threading.Thread(target=work).start()


@succeeds
def uses_its_names_in_a_finalizer_at_exit():
    class Last:
        def __del__(self):
            say("names are there:", Point is not None, sys is not None)

    kept.append(Last())


@succeeds
def uses_its_names_in_a_finalizer_after_an_import_of_torch():
    import torch  # modules that torch imports refer to the main module

    uses_its_names_in_a_finalizer_at_exit()
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
def keeps_the_order_with_what_children_write():
    print("first")
    subprocess.run(["echo", "second"], check=True)
    print("third")
    os.write(1, b"fourth\n")


@succeeds
def reads_the_end_of_its_input():
    try:
        input("a question? ")
    except EOFError as error:
        say("EOFError", error, repr(sys.stdin.read()))


@succeeds
def logs():
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(name)s %(filename)s:%(lineno)d %(process)d_"
    )
    logging.info("one")
    logging.getLogger("conformance").warning("two")
    logging.captureWarnings(True)
    warnings.warn("three", stacklevel=1)


@succeeds
def logs_without_being_told_how():
    logging.info("not shown")
    logging.warning("shown on stderr")


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
def handles_an_interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)
    except KeyboardInterrupt:
        say("interrupted")


@succeeds
def handles_an_alarm_in_a_system_call():
    signal.signal(signal.SIGALRM, lambda *_: os.write(writing, b"x"))
    reading, writing = os.pipe()
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    say(os.read(reading, 1), os.waitstatus_to_exitcode(os.system("exit 3")))


@succeeds
def forks():
    print("before, without a line's end", end="")
    pid = os.fork()
    if pid == 0:
        say(" in the child", threading.current_thread() is threading.main_thread())
        sys.exit(9)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@succeeds
def starts_python():
    code = "import sys; print(sys.argv, sys.flags.unbuffered if hasattr(sys.flags, 'unbuffered') else '', __name__)"
    ran = subprocess.run([sys.executable, "-c", code, "a"], capture_output=True, text=True, check=True)
    say(ran.stdout, ran.stderr)


@succeeds
def starts_python_with_its_own_options():
    say(subprocess._args_from_interpreter_flags())


@succeeds
def becomes_another_program():
    os.execlp(
        "sh", "sh", "-c", "echo another; grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; ls /proc/self/fd"
    )


@succeeds
def runs_an_event_loop():
    async def work():
        await asyncio.sleep(0)
        process = await asyncio.create_subprocess_exec("true")
        loop = asyncio.get_running_loop()
        got = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, got.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await got.wait()
        return await process.wait(), await asyncio.to_thread(lambda: 7)

    say(asyncio.run(work()))


@succeeds
def closes_its_streams():
    sys.stdout.close()
    os.close(0)


# Other codes.


@fails
def exits_with_3():
    sys.exit(3)


@fails
def exits_with_300():
    sys.exit(300)


@fails
def exits_with_minus_1():
    sys.exit(-1)


@fails
def exits_with_true():
    sys.exit(True)


@fails
def exits_with_a_text():
    sys.exit("a text for stderr: ü")


@fails
def exits_with_an_object():
    sys.exit([1, "two"])


@fails
def exits_at_once():
    atexit.register(say, "never said")
    print("unfinished", end="")
    os._exit(7)


@fails
def exits_within_with():
    @contextlib.contextmanager
    def manager():
        try:
            yield
        finally:
            say("left the with")

    def inner():
        with manager():
            try:
                sys.exit(5)
            finally:
                say("finally")

    atexit.register(say, "at exit")
    inner()


@fails
def exits_while_a_thread_runs():
    def work():
        threading.main_thread().join()
        say("the thread is through")

    threading.Thread(target=work).start()
    sys.exit(6)


@fails
def exits_at_exit():
    atexit.register(sys.exit, 8)
    sys.exit(9)


@fails
def raises():
    raise ValueError("an uncaught exception, with ü and\na second line")


@fails
def raises_from_another():
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("because of it") from error


@fails
def raises_while_handling():
    try:
        [].pop()
    except IndexError:
        print(1 + len(None))


@fails
def raises_a_group_with_notes():
    error = TypeError("inner")
    error.add_note("a note")
    raise ExceptionGroup("several", [error, ExceptionGroup("nested", [OSError(2, "text", "file")])])


@fails
def raises_what_cannot_be_shown():
    class SecretError(Exception):
        def __str__(self):
            raise ValueError

    raise SecretError


@fails
def raises_in_an_expression_of_several_lines():
    return (
        len("abc")
        + int(
            "not a number"
        )
    )  # fmt: skip


@fails
def raises_in_an_event_loop():
    async def work():
        await asyncio.sleep(0)
        raise LookupError("in a task")

    asyncio.run(work())


@fails
def raises_in_compiled_text():
    exec(compile("x = 1\n1 / 0\n", "<text>", "exec"))


@fails
def imports_what_is_not_there():
    import a_module_that_is_not_there  # noqa: F401


@fails
def is_interrupted():
    raise KeyboardInterrupt


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
def has_an_excepthook_of_its_own():
    sys.excepthook = lambda kind, error, trace: say(
        "my hook:", kind.__name__, error, trace.tb_frame.f_code.co_name
    )
    raise ValueError("for the hook")


@fails
def has_an_excepthook_that_raises():
    sys.excepthook = lambda *_: 1 / 0
    raise ValueError("for the hook")


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
