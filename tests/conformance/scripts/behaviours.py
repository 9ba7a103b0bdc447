"""What a training script may do while it runs, thing by thing; the results go into one JSON file."""

import concurrent.futures
import dataclasses
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.pool
import multiprocessing.shared_memory
import os
import pathlib
import subprocess
import sys
import traceback

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
    """A class of the script."""

    x: int
    rest: "list[int]"
    other: "Point | None" = None

    def total(self) -> "int":
        return self.x + sum(self.rest)


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


def batches(**options):
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, **options)
    return [[tensor.tolist() for tensor in batch] for batch in loader]


@thing
def data_loader_by_default():
    return batches(num_workers=2, persistent_workers=True)


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
def files_beside_it():
    beside = pathlib.Path(__file__).with_name("beside.txt").read_text()
    return beside, __file__, os.path.exists("beside.txt"), os.path.abspath("x")


@thing
def its_own_source():
    return inspect.getsource(Point), inspect.getsourcefile(Point), inspect.getmodule(Point).__name__


@thing
def traceback_of_a_caught_exception():
    try:
        fail()
    except ValueError:
        return traceback.format_exc()


@thing
def a_child_with_default_signals():
    ran = subprocess.run(
        ["grep", "-E", "Sig(Ign|Cgt|Blk)", "/proc/self/status"],
        capture_output=True,
        text=True,
        restore_signals=False,
    )
    return ran.stdout


def act(do):
    try:
        return do()
    except Exception:
        return {"failed": traceback.format_exc()}


def main():
    found = {name: act(do) for name, do in things.items()}
    place = os.path.join(os.environ["CONFORMANCE_FOLDER"], "things.json")
    with open(place, "w") as file:
        json.dump(found, file, default=str)


if __name__ == "__main__":
    main()
