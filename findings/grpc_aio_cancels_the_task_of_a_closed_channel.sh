#!/usr/bin/env bash
# grpcio 1.85, grpc.aio: when one task closes a channel, a call that another task awaits raises asyncio.CancelledError there,
# though nobody cancelled that task (Task.cancelling() is 0). The task ends as cancelled: a TaskGroup takes it for one that was
# told to end, and nothing reports that the call failed. The synchronous client raises RpcError with StatusCode.CANCELLED in
# the same place.
# One would guess: RpcError, as with every other end of a call that is not OK; a CancelledError that nobody asked for breaks
# what asyncio promises of tasks, and a handler for RpcError does not see the loss of the connection.
# Source: grpc/aio/_channel.py, _close: every call is cancelled; grpc/aio/_call.py, UnaryUnaryCall.__await__: a call that is
# cancelled locally raises CancelledError.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet grpcio==1.85.1
"$folder/bin/python" - <<'PYTHON'
import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

asked, over = threading.Event(), threading.Event()


class Waits(grpc.GenericRpcHandler):
    """Answers no call before the end."""

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self.wait)

    def wait(self, request, context):
        asked.set()
        over.wait()
        return b""


def error_of_a_thread(address: str) -> str:
    channel = grpc.insecure_channel(address)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(channel.unary_unary("/service/method"), b"")
        asked.wait()
        channel.close()
        error = call.exception()
    return f"RpcError {error.code()}" if isinstance(error, grpc.RpcError) else type(error).__name__


async def error_of_a_task(address: str) -> str:
    channel = grpc.aio.insecure_channel(address)

    async def call() -> str:
        try:
            await channel.unary_unary("/service/method")(b"")
        except BaseException as error:
            return f"{type(error).__name__}, cancelling() {asyncio.current_task().cancelling()}"
        return "none"

    asked.clear()
    calling = asyncio.create_task(call())
    await asyncio.to_thread(asked.wait)
    await channel.close()
    return await calling


server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Waits(),))
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
of_a_thread = error_of_a_thread(address)
of_a_task = asyncio.run(error_of_a_task(address))
over.set()
server.stop(None).wait()
print(f"grpcio {grpc.__version__}: synchronous: {of_a_thread}; grpc.aio: {of_a_task}")
seen = (of_a_thread, of_a_task) == ("RpcError StatusCode.CANCELLED", "CancelledError, cancelling() 0")
raise SystemExit(0 if seen else 1)
PYTHON
