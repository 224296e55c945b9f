"""TLS of clients and workers, and the check of a server's certificate before anything depends on it."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from wingbeat.core.errors import SetupError

CA_VARIABLE = "WINGBEAT_CA_FILE"
"""Names a PEM file: the certificates that vouch for the server, in place of those that the system trusts."""
HANDSHAKE_STEPS = 10


class CertificateRefused(SetupError):
    """The server's certificate is not accepted; trying again would not help."""

    code = "certificate_refused"


def client_context(ca: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """How clients and workers check a server's certificate.

    ``ca``: a PEM file, else the one of ``WINGBEAT_CA_FILE``, else what the system trusts.  The file may hold the
    certificate of an authority or that of the server itself.  Raises SetupError for a file that is none.
    """
    path = os.fspath(ca) if ca is not None else os.environ.get(CA_VARIABLE) or None
    try:
        context = ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise SetupError(
            f"cannot read the certificates in {path}: {error}; `ca` and {CA_VARIABLE} name a PEM file"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a self-signed certificate vouches for itself
    return context


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """What a server shows.  Raises SetupError: no such file, no PEM, or key and certificate of two pairs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise SetupError(
            f"server.tls_cert = {cert}, server.tls_key = {key}: expected a certificate and its unencrypted key in PEM"
            f" files, got {reason}"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("a key that needs a password")


def check_certificate(cert: Path, key: Path) -> None:
    """Refuse a certificate that no client would accept today, whoever vouches for it.

    Two ends in this process shake hands, of which one trusts just this certificate.  Raises SetupError.
    """
    ours = server_context(cert, key)
    theirs = client_context(cert)
    theirs.check_hostname = False
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = theirs.wrap_bio(to_client, to_server)
    server = ours.wrap_bio(to_server, to_client, server_side=True)
    open_ends = [client, server]
    for _ in range(HANDSHAKE_STEPS):
        for end in tuple(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise SetupError(f"server.tls_cert = {cert}: no client accepts it: {error.verify_message}") from None
        if not open_ends:
            return
    raise SetupError(f"server.tls_cert = {cert}: no TLS handshake succeeds with it")


def certificate_fault(error: BaseException) -> str:
    """Why a server's certificate was not accepted, in words; "" where that is not what ``error`` is about."""
    fault = getattr(error, "certificate_error", error)  # aiohttp wraps it
    if not isinstance(fault, ssl.SSLCertVerificationError):
        return ""
    return getattr(fault, "verify_message", "") or str(fault)
