"""Processes that are killed: a client's leases end, a server's boxes are ended by the next one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wingbeat.resources import ResourceLost, SubprocessSpec
from wingbeat.resources.remote import RemotePool

pytestmark = pytest.mark.slow
BOX = SubprocessSpec(network=True)
SETTINGS = ["--resources.kinds=['subprocess']", "--resources.network=true", "--resources.heartbeat_s=0.3"]
CLIENT = """
import asyncio, sys
from wingbeat.resources import SubprocessSpec
from wingbeat.resources.remote import RemotePool

async def main():
    async with RemotePool(sys.argv[1]).lease(SubprocessSpec(network=True)) as lease:
        print((await lease.value.run("echo held")).stdout.decode(), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def served(folder: Path, *more: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A `wingbeat resources` process and its address."""
    address = folder / "address.json"
    address.unlink(missing_ok=True)
    command = [sys.executable, "-m", "wingbeat.cli", "resources", f"--address-file={address}", f"--port={port}"]
    command += [*SETTINGS, f"--resources.ledger={folder / 'ledger'}", *more]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while not address.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        yield process, json.loads(address.read_text())["url"]
    finally:
        process.terminate()
        process.wait(30)


async def until_none_is_held(pool: RemotePool) -> Any:
    async with asyncio.timeout(20):
        while (status := await pool.status()).leases:  # noqa: ASYNC110, it is another process
            await asyncio.sleep(0.05)
    return status


async def test_the_leases_of_a_killed_client_end(tmp_path: Path) -> None:
    with served(tmp_path) as (process, url):
        client = await asyncio.to_thread(
            subprocess.Popen[bytes], [sys.executable, "-c", CLIENT, url], stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        assert await asyncio.to_thread(client.stdout.readline) == b"held\n"
        pool = RemotePool(url)
        assert (await pool.status()).leases == 1
        client.send_signal(signal.SIGKILL)
        client.wait()
        client.stdout.close()
        status = await until_none_is_held(pool)
        assert status.clients == 0
        await pool.close()
        process.terminate()
        assert process.wait(30) == 0, "a signal ends it in peace"


async def test_what_a_killed_server_lent_is_lost_and_the_next_one_ends_it(tmp_path: Path) -> None:
    marker = f"sleep {600 + os.getpid() / 1e6}"
    with served(tmp_path) as (process, url):
        pool = RemotePool(url, retry_budget_s=20)
        async with contextlib.AsyncExitStack() as stack:
            lease = await stack.enter_async_context(pool.lease(BOX))
            await lease.value.run(f"({marker} &) >/dev/null 2>&1")
            running = asyncio.create_task(lease.value.run("sleep 60"))
            await asyncio.sleep(0.2)
            process.kill()
            process.wait()
            with served(tmp_path, port=int(url.rpartition(":")[2])):
                with pytest.raises(ResourceLost):
                    await running
                async with asyncio.timeout(20):
                    while _is_running(marker):  # noqa: ASYNC110, it is another process
                        await asyncio.sleep(0.05)
                await stack.aclose()
                async with pool.lease(BOX) as again:
                    assert (await again.value.run("true")).ok
                await pool.close()


def _is_running(marker: str) -> bool:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().replace(b"\0", b" ").strip() == marker.encode():
                return True
    return False
