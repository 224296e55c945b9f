"""Runs hidden cases against a fresh copy of a package: a program of its own, for a sandbox's bare interpreter.

    python3 -I -S -B -c "$(cat hidden_runner.py)" < request.json

It imports nothing of Wingbeat and nothing but the standard library. The request names the agent's working folder,
the package, the cases' source and names, a nonce and the seconds there are. Of the working folder it takes the
package's own ``.py`` files and nothing else: no compiled ones, no ``conftest.py`` or ``sitecustomize.py`` beside it,
no links. Every case runs in a process of its own. The report is one line: the nonce, and what each case returned or
raised.

It holds no expected values. So the code under test may do what it likes, also to this process and its report: it can
only win by saying what the right program returns.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time

CASE_CPU_S = 1
"""Processor seconds of one case: on a busy machine a right one may take long by the clock."""
MAX_FILE_BYTES = 1_000_000
MAX_RESULT_BYTES = 200_000
MODULE = "hidden_cases"


def copy_package(workdir, package, target):
    """The regular ``.py`` files of a package, and no link on the way to them."""
    root = os.path.join(workdir, package)
    if os.path.islink(root):
        return
    for folder, names, found in os.walk(root):
        names[:] = [name for name in names if not os.path.islink(os.path.join(folder, name))]
        place = os.path.join(target, os.path.relpath(folder, workdir))
        os.makedirs(place, exist_ok=True)
        for name in found:
            source = os.path.join(folder, name)
            is_file = os.path.isfile(source) and not os.path.islink(source)
            if name.endswith(".py") and is_file and os.path.getsize(source) <= MAX_FILE_BYTES:
                shutil.copyfile(source, os.path.join(place, name))


def answer(name):
    """What a case returned or raised, as JSON."""
    try:
        value = getattr(importlib.import_module(MODULE), name)()
        return json.dumps({"value": value}, sort_keys=True, allow_nan=False)
    except BaseException as error:  # noqa: BLE001 (whatever the code under test raises is its answer)
        if type(error) in (KeyboardInterrupt, SystemExit, RecursionError, MemoryError):
            return json.dumps({"broken": type(error).__name__})
        return json.dumps({"raises": type(error).__name__})


def in_child(name, write_fd):
    """The child's whole life: alone in its session, with no input and no output but the pipe."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (CASE_CPU_S, CASE_CPU_S + 1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    data = answer(name).encode()
    while data:
        data = data[os.write(write_fd, data) :]


def run_case(name, deadline):
    """A case's answer, or why there is none."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_fd)
            in_child(name, write_fd)
        finally:
            os._exit(0)
    os.close(write_fd)
    chunks, size = [], 0
    complete = False
    while size <= MAX_RESULT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([read_fd], [], [], left)[0]:
            break
        chunk = os.read(read_fd, 65536)
        if not chunk:
            complete = True
            break
        chunks.append(chunk)
        size += len(chunk)
    os.close(read_fd)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not complete:
        return {"broken": "timeout" if size <= MAX_RESULT_BYTES else "size"}
    try:
        return json.loads(b"".join(chunks))
    except (ValueError, RecursionError):
        return {"broken": "no answer"}


def main():
    request = json.loads(sys.stdin.buffer.read())
    deadline = time.monotonic() + request["seconds"]
    target = tempfile.mkdtemp(prefix="scored-")
    try:
        copy_package(request["workdir"], request["package"], target)
        with open(os.path.join(target, MODULE + ".py"), "w", encoding="utf-8") as file:
            file.write(request["source"])
        sys.path.insert(0, target)
        answers = {name: run_case(name, deadline) for name in request["cases"]}
    finally:
        shutil.rmtree(target, ignore_errors=True)
    sys.stdout.write(request["nonce"] + " " + json.dumps(answers) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
