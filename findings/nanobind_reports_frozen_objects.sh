#!/usr/bin/env bash
# triton 3.9.0 (compiled with nanobind), Python 3.11 and newer: a process that calls gc.freeze() after `import triton` ends
# with some 30 lines on stderr, "nanobind: leaked 4 instances! … leaked 64 types! … leaked 577 functions!", without a
# newline at the end. After gc.unfreeze(), nothing is written.
# One would guess: gc.freeze() is what Python's documentation recommends before fork(), and changes no behaviour; but what
# is frozen is not collected when the interpreter ends either, and nanobind takes it for leaked. Fork servers with triton
# (any build of torch for GPUs whose process has made an optimizer) meet it at the end of each worker.
# Source: nanobind's src/nb_internals.cpp, internals_cleanup; Python's documentation of gc.freeze.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet triton==3.9.0
frozen=$("$folder/bin/python" -c 'import gc, triton; gc.freeze()' 2>&1)
thawed=$("$folder/bin/python" -c 'import gc, triton; gc.freeze(); gc.unfreeze()' 2>&1)
echo "lines about leaks at the end: after gc.freeze() $(grep -c leaked <<< "$frozen"), after gc.unfreeze() ${#thawed} characters"
grep -q "nanobind: leaked" <<< "$frozen" && [ -z "$thawed" ]
