"""What a failed connection says about TLS: faults that trying again does not cure, and a hint where it may be one."""

from __future__ import annotations

import aiohttp

from wingbeat.core.errors import WingbeatError
from wingbeat.core.tls import CA_VARIABLE, CertificateRefused, certificate_fault


def tls_fault(url: str, error: BaseException) -> WingbeatError | None:
    """The error to tell of; None where TLS has nothing to do with it."""
    refused = certificate_fault(error)
    if refused:
        return CertificateRefused(
            f"the certificate of the server at {url} is not accepted: {refused}; {_cure(refused)}"
        )
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        reason = str(getattr(error.os_error, "reason", None) or error.os_error)
        hint = "; a server without TLS has an address that begins with http://" if "WRONG_VERSION" in reason else ""
        return CertificateRefused(f"no TLS connection with the server at {url}: {reason}{hint}")
    return None


def tls_hint(url: str, error: BaseException) -> str:
    """A server with TLS hangs up without a word on whoever calls it without."""
    if url.startswith("http://") and isinstance(error, aiohttp.ServerDisconnectedError):
        return " If it has TLS, its address begins with https://."
    return ""


def _cure(refused: str) -> str:
    if "mismatch" in refused or "not valid for" in refused:
        return "call it by a name that the certificate has"
    if "expired" in refused:
        return "it must be renewed on the server"
    return f"name the certificates that vouch for it: Swarm(url, ca=FILE) or {CA_VARIABLE}=FILE"
