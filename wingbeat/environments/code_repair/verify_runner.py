"""Runs a program's tests and hidden cases against each of its mutants: the bare program behind :mod:`.verify`.

It loads the standard library and ``hidden_runner`` beside it. Each variant of the program runs in a process of its
own, so that nothing of one is seen by the next. Standard input is one JSON request, standard output one JSON
list: for every variant the names of failing tests and the answers of the hidden cases, or null if it does not end.
"""

import io
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import unittest
from importlib import util

VARIANT_S = 3.0


def beside(name):
    """A module of this folder, without the package around it: that would load the client for every run."""
    spec = util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), name + ".py"))
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hidden_runner = beside("hidden_runner")


def write_files(folder, files):
    for path, text in files.items():
        place = os.path.join(folder, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8") as file:
            file.write(text)


def failing_tests(folder):
    """Names of tests that do not pass; a module that cannot be imported is one name."""
    os.chdir(folder)
    suite = unittest.TestLoader().discover("tests")
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    broken = [test.id() for test, _ in [*result.failures, *result.errors]]
    return sorted({name.removeprefix("unittest.loader._FailedTest.") for name in broken})


def examine(folder, cases):
    sys.path.insert(0, folder)
    failing = failing_tests(folder)
    return {"failing": failing, "answers": {name: json.loads(hidden_runner.answer(name)) for name in cases}}


def in_child(folder, cases, write_fd):
    os.setsid()
    data = json.dumps(examine(folder, cases)).encode()
    while data:
        data = data[os.write(write_fd, data) :]


def run_variant(files, cases):
    """What a variant does, in a process that may hang."""
    folder = tempfile.mkdtemp(prefix="verified-")
    write_files(folder, files)
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            in_child(folder, cases, write_fd)
        finally:
            os._exit(0)
    os.close(write_fd)
    data = b""
    while select.select([read_fd], [], [], VARIANT_S)[0]:
        chunk = os.read(read_fd, 65536)
        if not chunk:
            break
        data += chunk
    os.close(read_fd)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(folder)
    return json.loads(data) if data else None


def main():
    request = json.load(sys.stdin)
    base = {**request["files"], hidden_runner.MODULE + ".py": request["hidden"]}
    variants = [{**base, **changed} for changed in request["variants"]]
    json.dump([run_variant(files, request["cases"]) for files in variants], sys.stdout)


if __name__ == "__main__":
    main()
