"""Waiting for the ledger, for whoever is to be told that something is on record."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import Future
from typing import TypeVar

from wingbeat.core.errors import UnavailableError

T = TypeVar("T")


async def until_durable(write: Future[T]) -> T:
    """What a write resolves to.

    Raises UnavailableError where the file takes it no more (a disk's I/O error): control ends then, and its successor
    goes on from what is on record, so that the same request again is right.
    """
    try:
        return await asyncio.wrap_future(write)
    except sqlite3.Error as error:
        raise UnavailableError(
            f"not recorded, the ledger failed ({error}): the server starts anew from what is on record; send this again"
        ) from error
