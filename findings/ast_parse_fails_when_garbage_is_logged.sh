#!/usr/bin/env bash
# Python 3.11 (3.11.2 and 3.11.7): ast.parse of correct source raises SystemError "AST constructor recursion depth mismatch" if
# the garbage collector runs meanwhile and what it collects logs an exception, as an asyncio task does whose exception nobody
# has retrieved. Python 3.12 and 3.13 do not.
# One would guess: what is collected meanwhile cannot change the result of a parse; at most it is reported beside it.
# Source: to place the marks below a line, traceback.py calls ast.parse itself (_extract_caret_anchors_from_line_segment), and
# Python/Python-ast.c of 3.11 keeps the depth of all conversions of an interpreter in one place, which PyAST_mod2obj compares
# with its value at the beginning.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
cat > "$folder/parse.py" <<'PYTHON'
import ast
import asyncio
import gc
import io
import logging
import platform

logging.basicConfig(stream=io.StringIO())
with open(ast.__file__) as file:
    source = file.read()


async def fail() -> None:
    print(1 / 0 + 2)


async def main() -> list[str]:
    errors = []
    for _ in range(20):
        task = asyncio.create_task(fail())
        cycle: list[object] = [task]
        cycle.append(cycle)
        await asyncio.sleep(0)
        del task, cycle
        try:
            ast.parse(source)
        except SystemError as error:
            errors.append(str(error))
    return errors


gc.set_threshold(50)  # so that a collection comes during the parse; by default it may come
errors = asyncio.run(main())
print(f"Python {platform.python_version()}: {len(errors)} of 20 calls of ast.parse failed: {errors[:1]}")
raise SystemExit(not errors)
PYTHON
python3.11 "$folder/parse.py"
