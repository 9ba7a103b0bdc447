"""The etcd3 package's gRPC interface, made to work on today's protobuf; the only module that imports it.

etcd3 0.12 was generated for protobuf 3: importing it on protobuf 4 or newer fails ("Descriptors cannot be created
directly"), unless protobuf is slowed down to its pure Python implementation by an environment variable. Its generated
modules carry their descriptors as serialized bytes, though. Those are read out of the installed files, and the modules
built from them with what protobuf offers for this since 3.20, before etcd3 is imported.

Only its messages and stubs are used, and what a client builds of them. "Dependencies" in docs/internals.md explains why
its client is not used, and why the stubs are not generated from etcd's own files.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_GENERATED = ("kv_pb2", "auth_pb2", "rpc_pb2")
"""In the order in which they need each other."""


class EtcdPackageError(ImportError):
    """The installed etcd3 package is not one that this module understands."""


def _load() -> tuple[Any, Any]:
    if "etcd3" not in sys.modules:
        _provide_generated_modules()
    with _quiet_grpc():
        import etcd3.etcdrpc
        import grpc
    return grpc, etcd3.etcdrpc


def _provide_generated_modules() -> None:
    """Put ``etcd3.etcdrpc.*_pb2`` into ``sys.modules``; importing etcd3 then finds them there."""
    from google.protobuf import descriptor_pool
    from google.protobuf.internal import builder

    pool = descriptor_pool.DescriptorPool()  # a pool of our own: "kv.proto" may mean another file elsewhere
    for name in _GENERATED:
        full_name = f"etcd3.etcdrpc.{name}"
        module = ModuleType(full_name)
        file = pool.AddSerializedFile(_serialized_descriptor(name)) or pool.FindFileByName(_proto(name))
        names = module.__dict__
        names["DESCRIPTOR"] = file
        builder.BuildMessageAndEnumDescriptors(file, names)
        builder.BuildTopDescriptorsAndMessages(file, full_name, names)
        sys.modules[full_name] = module


def _proto(module: str) -> str:
    return module.removesuffix("_pb2") + ".proto"


def _serialized_descriptor(module: str) -> bytes:
    """Return what the generated module hands to protobuf: one of the constants of its bytecode, which is not run."""
    found = importlib.util.find_spec("etcd3")
    if found is None or not found.submodule_search_locations:
        raise EtcdPackageError("the package etcd3 is not installed; pip install 'etcd3>=0.12,<0.13'")
    path = Path(next(iter(found.submodule_search_locations)), "etcdrpc", f"{module}.py")
    code = SourceFileLoader(f"etcd3.etcdrpc.{module}", str(path)).get_code(f"etcd3.etcdrpc.{module}")
    start = f"\n{chr(len(_proto(module)))}{_proto(module)}"  # its first field: the file's name
    for constant in code.co_consts if code is not None else ():
        if isinstance(constant, str) and constant.startswith(start):
            return constant.encode("latin1")
    raise EtcdPackageError(f"{path} contains no serialized descriptor; expected etcd3 0.12")


@contextmanager
def _quiet_grpc() -> Iterator[None]:
    """Set gRPC's log level, which it reads from this variable at import; no worker is to inherit it."""
    name = "GRPC_VERBOSITY"
    if name in os.environ:
        yield
        return
    os.environ[name] = "NONE"
    try:
        yield
    finally:
        del os.environ[name]


grpc: Any
"""gRPC itself: import it from here, because it logs to standard error if it is imported elsewhere first."""

rpc: Any
"""Messages (``rpc.RangeRequest``) and stubs (``rpc.KVStub``) of etcd's API version 3."""

grpc, rpc = _load()


# -- building requests ---------------------------------------------------------------------------


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with ``prefix``."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def put(key: bytes, value: bytes, lease_id: int = 0) -> Any:
    """Return an operation of a transaction: write the key, to last as long as the lease."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease_id))


def replace(key: bytes, value: bytes) -> Any:
    """Return an operation of a transaction: write the key, which is there and keeps its lease."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, ignore_lease=True))


def get(key: bytes, end: bytes | None = None) -> Any:
    """Return an operation of a transaction: read the key, or all keys from it up to ``end``."""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key, range_end=end or b""))


def delete(key: bytes, end: bytes | None = None) -> Any:
    """Return an operation of a transaction: remove the key, or all keys from it up to ``end``."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=end or b""))


def is_missing(key: bytes) -> Any:
    """Return a condition: there is no such key."""
    return rpc.Compare(key=key, target=rpc.Compare.VERSION, result=rpc.Compare.EQUAL, version=0)


def has_value(key: bytes, value: bytes) -> Any:
    """Return a condition: the key has this value."""
    return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=value)


def was_created_at(key: bytes, revision: int) -> Any:
    """Return a condition: the key has existed since this revision."""
    return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision)


# -- reading answers -----------------------------------------------------------------------------


def found_in(response: Any) -> Any | None:
    """Return what one operation of a transaction found: a KeyValue, or None."""
    found = response.response_range.kvs
    return found[0] if found else None


def value_in(response: Any) -> bytes | None:
    """Return the value that it found."""
    found = found_in(response)
    return bytes(found.value) if found is not None else None
