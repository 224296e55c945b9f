"""The tree of errors that cross a boundary of Wingbeat.

Every class names its HTTP status, a stable machine-readable ``code`` and whether a retry can help.
Messages say what was expected, what came and how to fix it.

    WingbeatError
    ├─ RequestError (400)           UnsupportedField, UnsupportedProtocol, ContextOverflow, InvalidToolSchema, ...
    ├─ AuthenticationError (401), PermissionDenied (403)
    ├─ NotFoundError (404)          UnknownPolicy, UnknownEpisode
    ├─ ConflictError (409)          EpisodeClosed, IdempotencyConflict
    ├─ PayloadTooLarge (413)
    ├─ OverloadedError (429)        LimitReached; carries retry_after_s
    ├─ CallTimeout (504)
    ├─ UnavailableError (503)       NoEngine, VersionGone
    └─ SetupError (exit code 2)     ConfigError, ModelSourceError, PortInUse, LedgerCorrupt, DependencyMissing
"""

from __future__ import annotations


class WingbeatError(Exception):
    """Base of all errors that users may see."""

    status = 500
    code = "internal_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request field at fault, where there is one."""


class RequestError(WingbeatError, ValueError):
    """The request's content is wrong."""

    status = 400
    code = "invalid_request"


class UnsupportedProtocol(RequestError):
    """Client and server speak no common version of the episode contract; the message names both ranges."""

    code = "unsupported_protocol"


class UnsupportedField(RequestError):
    """A field that would change the result cannot be honoured, so it is refused by name."""

    code = "unsupported_field"


class ContextOverflow(RequestError):
    """The prompt does not fit into the policy's context."""

    code = "context_length_exceeded"


class InvalidToolSchema(RequestError):
    """A tool's ``parameters`` is no JSON schema."""

    code = "invalid_tool_schema"


class InvalidReward(RequestError):
    """A reward is not a finite number, or belongs to nobody in the episode."""

    code = "invalid_reward"


class AuthenticationError(WingbeatError):
    """No key, or one that this server never issued."""

    status = 401
    code = "invalid_api_key"


class PermissionDenied(WingbeatError):
    """The key is valid but not for this."""

    status = 403
    code = "permission_denied"


class NotFoundError(WingbeatError):
    """The named thing does not exist."""

    status = 404
    code = "not_found"


class UnknownPolicy(NotFoundError):
    """The requested model is none of the episode's policies."""

    code = "model_not_found"


class UnknownEpisode(NotFoundError):
    """No episode has this id."""

    code = "episode_not_found"


class ConflictError(WingbeatError):
    """The request contradicts what already happened."""

    status = 409
    code = "conflict"


class EpisodeClosed(ConflictError):
    """The episode is finished, aborted or lost."""

    code = "episode_closed"


class IdempotencyConflict(ConflictError):
    """The same idempotency key came with another body."""

    code = "idempotency_conflict"


class PayloadTooLarge(WingbeatError):
    """The body is larger than the server accepts."""

    status = 413
    code = "payload_too_large"


class OverloadedError(WingbeatError):
    """Admission is full; come back after ``retry_after_s``."""

    status = 429
    code = "admission_full"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LimitReached(OverloadedError):
    """A client has as much of something as one client may have; the message names limit, client and number."""

    code = "limit_reached"


class CallTimeout(WingbeatError):
    """A model call lasted longer than ``limits.call_s``; the same again would, too."""

    status = 504
    code = "call_timeout"


class UnavailableError(WingbeatError):
    """Something the request needs is not there right now."""

    status = 503
    code = "unavailable"
    retryable = True


class NoEngine(UnavailableError):
    """No engine serves this policy (version) at present."""

    code = "no_engine"


class VersionGone(UnavailableError):
    """A pinned policy version was released before it could be served."""

    code = "version_gone"
    retryable = False


class SetupError(WingbeatError, ValueError):
    """Something on this machine or in the configuration must be fixed first; the CLI prints one line."""

    code = "setup_error"
    exit_code = 2


class ConfigError(SetupError):
    """The configuration does not validate."""

    code = "config_error"


class ModelSourceError(SetupError):
    """A model folder, GGUF file, package or hub name cannot be loaded."""

    code = "model_source_error"


class PortInUse(SetupError):
    """Another process listens on the wanted port."""

    code = "port_in_use"


class LedgerCorrupt(SetupError):
    """The ledger's file is damaged; the message says where, and how to go back to its last good copy."""

    code = "ledger_corrupt"


class DependencyMissing(SetupError):
    """An optional dependency is not installed; the message names the extra."""

    code = "dependency_missing"
