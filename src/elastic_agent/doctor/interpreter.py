"""What is installed for the interpreter that runs the script.

The interpreter is asked in a process of its own: it may be another one than the agent's.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

TIMEOUT_S = 8.0
PACKAGES = (
    "accelerate", "datasets", "deepspeed", "flash-attn", "lightning", "megatron-core", "msgspec", "numpy",
    "pytorch-lightning", "torch", "torchvision", "transformers", "triton",
)  # fmt: skip
"""Distributions whose versions are compared."""

_PROGRAM = r"""
import sys
if sys.path[:1] == [""]:
    del sys.path[0]  # the working directory: its files may have the names of modules that are imported here
import hashlib, importlib.util, json, os, platform, re
wanted = json.loads(sys.argv[1])
if not getattr(sys.flags, "safe_path", False):
    sys.path.insert(0, wanted["folder"])
def spec_of(name):
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
versions = {}
for place in reversed(sys.path):  # by the names of folders: parsing the metadata of 200 packages takes a second
    for name in os.listdir(place or ".") if os.path.isdir(place or ".") else ():
        if name.endswith(".dist-info") and "-" in name[:-10]:
            package, version = name[:-10].rsplit("-", 1)
            versions[package.lower().replace("_", "-").replace(".", "-")] = version
every = sorted(f"{package}=={version}" for package, version in versions.items())
torch, nccl_version, cuda, library = spec_of("torch"), "", "", ""
if torch is not None and torch.origin:
    try:
        with open(os.path.join(os.path.dirname(torch.origin), "version.py")) as file:
            text = file.read()
        found = re.search(r"^cuda[^=\n]*= *'([^']+)'", text, re.M)
        cuda = found.group(1) if found else ""
    except OSError:
        pass
places = [one for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
packaged = spec_of("nvidia.nccl") if spec_of("nvidia") else None
places += [os.path.join(one, "lib") for one in (packaged.submodule_search_locations or () if packaged else ())]
for place in places:
    if os.path.exists(os.path.join(place, "libnccl.so.2")):
        library = os.path.realpath(os.path.join(place, "libnccl.so.2"))
        break
nccl_version = next((version for name, version in versions.items() if name.startswith("nvidia-nccl-")), "")
json.dump({
    "python": platform.python_version(),
    "versions": {name: versions[name] for name in wanted["packages"] if name in versions},
    "digest": hashlib.sha256("\n".join(every).encode()).hexdigest()[:12],
    "missing": [name for name in wanted["modules"] if spec_of(name) is None],
    "cuda": cuda, "nccl": nccl_version, "nccl_library": library,
}, sys.stdout)
"""


class Installed(Struct, frozen=True):
    """What an interpreter has."""

    python: str = ""
    versions: dict[str, str] = {}
    """Of those of :data:`PACKAGES` that are installed."""
    digest: str = ""
    """Of the names and versions of all installed packages."""
    missing: tuple[str, ...] = ()
    """Modules that were asked for and are not found."""
    cuda: str = ""
    """The CUDA version for which torch was built."""
    nccl: str = ""
    nccl_library: str = ""
    """The file that torch would load."""
    problem: str = ""
    """Why the interpreter could not be asked."""


def ask_interpreter(python: str, folder: str, modules: Sequence[str]) -> Installed:
    """Ask an interpreter what it has. Blocks for :data:`TIMEOUT_S` at most.

    Args:
        python: the interpreter.
        folder: the first entry of ``sys.path`` in the script.
        modules: top-level modules that are to be found.
    """
    wanted = {"folder": folder, "modules": list(modules), "packages": PACKAGES}
    command = [python, "-c", _PROGRAM, msgspec.json.encode(wanted).decode()]
    try:
        found = subprocess.run(
            command, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
        return msgspec.json.decode(found.stdout, type=Installed)
    except subprocess.TimeoutExpired:
        return Installed(problem=f"no answer within {TIMEOUT_S:g} s")
    except OSError as failure:
        return Installed(problem=failure.strerror or str(failure))
    except (ValueError, RecursionError):
        last = found.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return Installed(problem=last[0] if last else f"exit code {found.returncode}")


def script_folder(script: str, *, is_module: bool) -> str:
    """What ``sys.path[0]`` is when Python runs this script."""
    return str(Path.cwd() if is_module or not script else Path(script).resolve().parent)
