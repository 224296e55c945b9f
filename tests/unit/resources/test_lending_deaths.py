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
import trustme

from wingbeat.core.errors import AuthenticationError, ConfigError
from wingbeat.resources import ResourceLost, SubprocessSpec
from wingbeat.resources.remote import RemotePool, RemoteResources

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


async def test_keys_and_certificates_are_those_of_any_server(tmp_path: Path) -> None:
    authority, secret = trustme.CA(), "an admin key of this test"
    made = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    tls = [f"--server.tls_cert={tmp_path / 'cert.pem'}", f"--server.tls_key={tmp_path / 'key.pem'}"]
    with served(tmp_path, *tls, f"--server.admin_key={secret}") as (_, url):
        assert url.startswith("https://")
        async with RemoteResources(url, secret, ca=tmp_path / "ca.pem") as pool, pool.lease(BOX) as lease:
            assert (await lease.value.run("echo held")).stdout == b"held\n"
        for key, ca, error, words in (
            (None, tmp_path / "ca.pem", AuthenticationError, "no API key"),
            (secret, None, ConfigError, "certificate"),
        ):
            async with RemoteResources(url, key, ca=ca, retry_budget_s=0) as pool:
                with pytest.raises(error, match=words):
                    async with pool.lease(BOX):
                        pass


async def test_a_server_that_is_to_end_does_not_wait_for_those_who_wait_for_it(tmp_path: Path) -> None:
    with served(tmp_path, "--resources.heartbeat_s=5") as (process, url):
        pool = RemotePool(url, retry_budget_s=0)
        one = BOX.model_copy(update={"limit": 1})
        async with contextlib.AsyncExitStack() as stack:
            lease = await stack.enter_async_context(pool.lease(one))
            waiting = asyncio.create_task(pool.lease(one).__aenter__())
            async with asyncio.timeout(10):
                while (await pool.status()).leases < 2:  # noqa: ASYNC110, it is another process
                    await asyncio.sleep(0.01)
            began = time.monotonic()
            process.terminate()
            for told in (waiting, lease.value.run("sleep 60")):
                with pytest.raises(ResourceLost):
                    await told
            assert await asyncio.to_thread(process.wait, 30) == 0
            assert time.monotonic() - began < 8, "less than what it gives requests that go on"
        await pool.close()


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
