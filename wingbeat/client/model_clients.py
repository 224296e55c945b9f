"""Official SDK clients of an episode, set up to outlive a restart of the server.

Their default of two retries ends after about two seconds, which no restart does.  The SDKs of OpenAI and Anthropic wait
``min(0.5 * 2**n, 8)`` seconds before retry ``n``, less up to a quarter: 14 retries last 65 to 88 seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.core.errors import DependencyMissing

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

MODEL_CALL_RETRIES = 14
"""``max_retries`` with which model calls bridge a restart of a minute."""


def async_openai(base_url: str, api_key: str, options: dict[str, Any]) -> AsyncOpenAI:
    """Raises DependencyMissing where the SDK is not installed."""
    try:
        from openai import AsyncOpenAI
    except ModuleNotFoundError as error:
        raise _missing("openai") from error
    return AsyncOpenAI(**_settings(base_url, api_key, options))


def sync_openai(base_url: str, api_key: str, options: dict[str, Any]) -> OpenAI:
    """As :func:`async_openai`."""
    try:
        from openai import OpenAI
    except ModuleNotFoundError as error:
        raise _missing("openai") from error
    return OpenAI(**_settings(base_url, api_key, options))


def _settings(base_url: str, api_key: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"base_url": base_url, "api_key": api_key, "max_retries": MODEL_CALL_RETRIES, **options}


def _missing(name: str) -> DependencyMissing:
    return DependencyMissing(f"the {name} SDK is not installed here: pip install {name}")
