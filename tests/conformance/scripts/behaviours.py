"""What a training script may do while it runs, thing by thing; the results go into one JSON file."""

import concurrent.futures
import dataclasses
import doctest
import enum
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.pool
import multiprocessing.shared_memory
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
import typing

import sibling

if __name__ == "__main__":  # children that are spawned or forked from a server do without
    import torch
    import torch.utils.data

    class Net(torch.nn.Module):
        """A model of the script."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.layer(x)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2


things = {}


def thing(function):
    """Something to do; what it returns must be the same as under bare Python."""
    things[function.__name__] = function
    return function


@dataclasses.dataclass
class Point:
    """A class of the script.

    >>> Point(1, [2]).total()
    3
    """

    x: int
    rest: "list[int]"
    other: "Point | None" = None

    def total(self) -> "int":
        return self.x + sum(self.rest)


class Colour(enum.Enum):
    """An enumeration of the script."""

    RED = 1


class Squares:
    """A data set of the script."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = importlib.import_module("torch.utils.data").get_worker_info()
        return index * index, -1 if info is None else info.num_workers


def total(point):
    return point.total(), __name__ in ("__main__", "__mp_main__"), type(point).__module__


def moved(point):
    return Point(point.x + 1, point.rest, point)


def put_total(queue, point):
    queue.put((total(point), moved(point)))


def is_of_this_script(point):
    return type(point) is Point and type(point.other) is Point, point.x


def write_shared(name):
    shared = multiprocessing.shared_memory.SharedMemory(name)
    shared.buf[0] = 7
    shared.close()


def fail():
    raise ValueError("in a child")


def leave(code):
    sys.exit(code)


def processes(method):
    """Process, Queue, Pool, executor and shared memory, with what is defined in ``__main__``."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=put_total, args=(queue, Point(1, [2])))
    child.start()
    summed, point = queue.get(timeout=300)
    found = [summed, is_of_this_script(point)]
    child.join()
    leaver = context.Process(target=leave, args=(3,))
    leaver.start()
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    with context.Pool(2) as pool:
        found.append(pool.map(total, [Point(n, []) for n in range(3)]))
        found.append(is_of_this_script(pool.apply(moved, (Point(1, []),))))
        pool.apply(write_shared, (shared.name,))
        try:
            pool.apply(fail)
        except ValueError as error:
            found.append(str(error))
    found.append(shared.buf[0])
    shared.close()
    shared.unlink()
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        found.append(executor.submit(total, Point(4, [5])).result())
        found.append(is_of_this_script(executor.submit(moved, Point(4, [5])).result()))
    leaver.join()
    return [*found, child.exitcode, leaver.exitcode]


@thing
def multiprocessing_with_fork():
    return processes("fork")


@thing
def multiprocessing_with_spawn():
    return processes("spawn")


@thing
def multiprocessing_with_forkserver():
    return processes("forkserver")


@thing
def names_of_child_processes():
    return multiprocessing.Process().name.rpartition("-")[0], multiprocessing.current_process().name


def batches(**options):
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, **options)
    return [[one.tolist() for one in batch] for batch in loader]


class Points(Squares):
    """A data set of objects of the script."""

    def __getitem__(self, index):
        return super().__getitem__(index), moved(Point(index, []))


def objects_from_a_loader(method):
    options = {"num_workers": 1, "multiprocessing_context": method, "collate_fn": list}
    loader = torch.utils.data.DataLoader(Points(), batch_size=4, **options)
    return [(item, is_of_this_script(point)) for batch in loader for item, point in batch]


@thing
def objects_from_a_loader_with_fork():
    return objects_from_a_loader("fork")


@thing
def data_loader_by_default():
    return batches(num_workers=2, persistent_workers=True)


@thing
def torch_multiprocessing_spawn():
    torch.multiprocessing.spawn(leave_if_wrong, args=(torch.ones(2),), nprocs=1)
    return "joined"


def leave_if_wrong(index, tensor):
    sys.exit(0 if tensor.sum() == 2 else 1)


@thing
def pickling_of_its_own_classes():
    data = pickle.dumps([Point(1, [2], Point(3, [])), Colour.RED, total])
    return pickle.loads(data) == [Point(1, [2], Point(3, [])), Colour.RED, total], data.hex()


@thing
def saving_and_loading_a_model():
    with tempfile.TemporaryDirectory() as folder:
        torch.save(Net(), f"{folder}/net")
        net = torch.load(f"{folder}/net", weights_only=False)
        torch.save(net.state_dict(), f"{folder}/state")
        return type(net) is Net, sorted(torch.load(f"{folder}/state"))


@thing
def a_process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.module.layer.bias.grad.tolist()
    # torch 2.13: the last owner of a Gloo group that goes away while Python's lock is held joins the group's thread,
    # and that thread may wait for the lock; so the model goes first and destroy_process_group, which lets go, ends it.
    del model
    torch.distributed.destroy_process_group()
    return gradient


@thing
def scripting_a_function():
    return torch.jit.script(double)(torch.ones(1)).tolist()


@thing
def importing_a_sibling():
    return sibling.value(), sibling.WHO_IMPORTS, os.path.basename(sibling.__file__)


@thing
def importing_main_by_its_name():
    return importlib.import_module("__main__").Point is Point


@thing
def importing_itself_again():
    again = importlib.import_module("behaviours")
    return again.Point is Point, again.__name__


@thing
def files_beside_it():
    beside = pathlib.Path(__file__).with_name("beside.txt").read_text()
    return beside, __file__, os.path.exists("beside.txt"), os.path.abspath("x")


@thing
def its_own_source():
    return inspect.getsource(Point), inspect.getsourcefile(Point), inspect.getmodule(Point).__name__


@thing
def doctests():
    return list(doctest.testmod(sys.modules["__main__"]))


@thing
def type_hints():
    hints = {name: str(hint) for name, hint in typing.get_type_hints(Point).items()}
    return hints, str(typing.get_type_hints(Point.total)), str(dataclasses.fields(Point)[1].type)


@thing
def names_of_its_classes():
    return (
        repr(Point),
        repr(Colour.RED),
        Point.__module__,
        Point.__qualname__,
        str(total).partition(" at ")[0],
    )


@thing
def traceback_of_a_caught_exception():
    try:
        fail()
    except ValueError:
        return traceback.format_exc()


@thing
def stack_of_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(traceback.format_stack()))
    thread.start()
    thread.join()
    return found


@thing
def a_child_that_runs_python():
    ran = subprocess.run(
        [sys.executable, "-u", "-c", "import sys; print(sys.argv, sys.path[0])", "a"],
        capture_output=True,
        text=True,
    )
    return ran.stdout, ran.stderr, ran.returncode


@thing
def a_child_with_default_signals():
    ran = subprocess.run(
        ["grep", "-E", "Sig(Ign|Cgt|Blk)", "/proc/self/status"],
        capture_output=True,
        text=True,
        restore_signals=False,
    )
    return ran.stdout


@thing
def a_child_in_a_shell():
    return os.popen("ls /proc/self/fd; umask").read()


def act(do):
    try:
        return do()
    except Exception:
        return {"failed": traceback.format_exc()}


def main():
    methods = sys.argv[1:]  # given: of loaders that start Python, and import torch, once more
    found = {one: objects_from_a_loader(one) for one in methods}
    found = found or {name: act(do) for name, do in things.items()}
    place = os.path.join(os.environ["CONFORMANCE_FOLDER"], "things.json")
    with open(place, "w") as file:
        json.dump(found, file, default=str)


if __name__ == "__main__":
    main()
