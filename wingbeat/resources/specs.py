"""What to lease: what a resource is, how much of the machine it takes, and whether it serves again.

A spec is plain data (but for :class:`LocalSpec`, which names functions of this process), checked alone when it
is made and by its back-end before anything waits for it.  Its ``key`` is of *all* its fields: two specs that
differ in one environment variable never share an instance.

Here is what all kinds have in common, and those of this machine; the others are in
:mod:`wingbeat.resources.specs_remote`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from wingbeat.core.errors import ConfigError, UnavailableError
from wingbeat.core.suggestions import did_you_mean
from wingbeat.resources.boxes import check_env

Hook = Callable[[Any], Any | Awaitable[Any]]


class ResourceFailed(UnavailableError):
    """A resource is not there: a failure of infrastructure, which never becomes a reward."""

    code = "resource_failed"
    retryable = False


class ResourceLost(ResourceFailed):
    """It was there, and broke or was ended under its holder."""

    code = "resource_lost"


class ResourceWait(ResourceFailed):
    """Its turn did not come in time."""

    code = "resource_wait"


class UnsupportedField(ConfigError):
    """A back-end cannot honour a field of a spec, so it is refused by name instead of being ignored."""

    code = "unsupported_field"

    def __init__(self, kind: str, field: str, instead: str) -> None:
        super().__init__(f"resource kind {kind!r}: field {field!r} is not supported; {instead}", param=field)
        self.kind = kind
        self.field = field


class Reuse(StrEnum):
    """Whether a resource that was given back serves again."""

    NEVER = "never"
    """It is closed: nothing of one episode can reach another."""
    AFTER_RESET = "after_reset"
    """It serves again once its reset succeeded and it is healthy."""
    SHARED = "shared"
    """One serves all leases at the same time; it may be closed once nobody holds it."""


class SpecKey:
    """All fields of a spec; hashed once, since every lease looks its spec up."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecKey) and self._parts == other._parts


class FrozenDict(dict[str, str]):
    """A mapping that stays what it was when its spec was checked and its key was taken."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a spec cannot be changed; make another with spec.model_copy(update={...})")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, str]]]:
        return FrozenDict, (dict(self),)


def _frozen(texts: dict[str, str]) -> FrozenDict:
    """Sorted: the order in which somebody wrote them makes no other spec."""
    return FrozenDict(sorted(texts.items()))


Texts = Annotated[dict[str, str], AfterValidator(_frozen)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Fields(BaseModel, frozen=True):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class Needs(_Fields, frozen=True):
    """What an instance takes of the pool's budgets for as long as it lives."""

    cpus: Share = 0.0
    memory_mb: Annotated[int, Field(ge=0)] = 0
    gpus: Annotated[int, Field(ge=0)] = 0


class Draw(_Fields, frozen=True):
    """What one lease takes of a named budget when it begins; requests and tokens come back minute by minute."""

    budget: Annotated[str, Field(min_length=1)]
    requests: Share = 1.0
    tokens: Share = 0.0
    cost: Share = 0.0


class Spec(_Fields, frozen=True):
    """What all kinds have in common."""

    kind: str
    label: str = ""
    """Names this class of resources in metrics, beside its kind."""
    reuse: Reuse = Reuse.NEVER
    limit: Count | None = None
    """Instances of this spec at once; leases beyond wait their turn."""
    needs: Needs | None = None
    """None: what its own limits allow it to take, see :attr:`holds`."""
    draw: Draw | None = None
    """What every lease takes of a budget of rates or costs."""
    start_timeout_s: Positive = 60.0
    reset_timeout_s: Positive = 30.0
    """Also that of the health check."""
    close_timeout_s: Positive = 30.0
    idle_ttl_s: Positive | None = 300.0
    """An instance that nobody used for so long is closed.  None: only when another spec needs its place."""
    max_uses: Count | None = None
    """Leases that one instance serves."""

    if not TYPE_CHECKING:  # a type checker knows the fields by themselves

        def __init__(self, **fields: Any) -> None:
            """Raises ConfigError that names what is wrong."""
            try:
                super().__init__(**fields)
            except ValidationError as error:
                kind = fields.get("kind") or type(self).model_fields["kind"].default
                raise ConfigError(words_of(error, str(kind), tuple(type(self).model_fields))) from None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.reuse is Reuse.NEVER and self.max_uses not in (None, 1):
            raise ValueError(f"max_uses: expected 1 or none where reuse is never, got {self.max_uses}")
        if self.reuse is Reuse.SHARED and self.limit not in (None, 1):
            raise ValueError(f"limit: expected 1 or none where reuse is shared (one serves all), got {self.limit}")
        return self

    @cached_property
    def key(self) -> Hashable:
        """Equal for specs whose every field is equal: what may share an instance."""
        return SpecKey((self.kind, self.model_dump_json()))

    @cached_property
    def start_key(self) -> Hashable:
        """Equal for specs that start alike: it leaves out what comes from tasks, so that a missing image is noticed
        though each task has files of its own."""
        of_tasks = {"files": True, "env": True, "label": True, "box": {"files", "env"}}
        return SpecKey((self.kind, self.model_dump_json(exclude=of_tasks)))

    @property
    def holds(self) -> Needs:
        """What counts against the budgets."""
        return self.needs or Needs()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Another spec, checked like the first one: a copy must not keep the key of what it was made from."""
        del deep  # nothing in a spec can be changed
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **(update or {})})

    @property
    def title(self) -> str:
        """Of its class, in messages."""
        return f"{self.kind} {self.label!r}" if self.label else self.kind


class LocalSpec(Spec, frozen=True):
    """An in-process object.  Hooks may be coroutine functions; this kind never crosses a process."""

    kind: Literal["local"] = "local"
    factory: Callable[[], Any]
    """Makes one, or a coroutine that makes one; called for every new object."""
    reset: Hook | None = None
    """Makes a used object as good as new.  ``AFTER_RESET`` needs it."""
    health: Callable[[Any], Any] | None = None
    """Whether (bool) an object may be handed out again."""
    close: Hook | None = None
    """Frees what the object holds."""

    @model_validator(mode="after")
    def _reset_is_used(self) -> Self:
        if self.reuse is Reuse.AFTER_RESET and self.reset is None:
            raise ValueError("reuse after_reset: expected a reset hook, got none")
        if self.reuse is not Reuse.AFTER_RESET and self.reset is not None:
            raise ValueError(f"reuse {self.reuse}: expected no reset hook, since it would not be called")
        for name in ("factory", "reset", "health", "close"):
            hook = getattr(self, name)
            if hook is not None and not isinstance(hook, Hashable):
                raise ValueError(f"{name}: expected a hashable function, got {type(hook).__name__}")
        return self

    @cached_property
    def key(self) -> Hashable:
        return SpecKey(tuple(getattr(self, name) for name in type(self).model_fields))

    @cached_property
    def start_key(self) -> Hashable:
        return self.key


class Mount(_Fields, frozen=True):
    """A path of the host that a box sees."""

    source: Annotated[str, Field(pattern=r"^/")]
    target: Annotated[str, Field(pattern=r"^/")]
    read_only: bool = True


class BoxSpec(Spec, frozen=True):
    """Something that runs commands and holds files; see :class:`wingbeat.resources.boxes.Box`."""

    env: Texts = {}
    files: Texts = {}
    """Path in ``workdir`` -> text, written at start and again at every reset."""
    workdir: Annotated[str, Field(pattern=r"^/")] = "/work"
    mounts: tuple[Mount, ...] = ()
    network: bool = False
    cpus: Positive | None = None
    memory_mb: Count | None = None
    """All that its processes hold together."""
    process_memory_mb: Count | None = None
    """Addresses of one process: less than a limit of its memory, and there where nothing can limit that."""
    pids: Count | None = None
    """Processes and threads at once."""
    disk_mb: Count | None = None
    """What its folders hold: ``workdir``, and as much again in the ``/tmp`` of a sandbox; containers divide it."""
    file_mb: Count | None = None
    """One file."""
    command_timeout_s: Positive = 60.0
    cpu_s: Positive | None = None
    """Processor seconds of one command."""
    output_bytes: Count = 1_000_000
    """Kept of each output of one command."""

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.file_mb is not None and self.disk_mb is not None and self.file_mb > self.disk_mb:
            raise ValueError(f"file_mb: expected at most disk_mb ({self.disk_mb}), got {self.file_mb}")
        return self

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        """A fault of these would fail each start of such a box, as if the machine were at fault."""
        check_env(self.env)
        for path in self.files:
            parts = path.split("/")
            if "\0" in path or any(part in ("", ".", "..") for part in parts):
                raise ValueError(f"files: expected paths inside workdir, such as src/main.py, got {path!r}")
            for count in range(1, len(parts)):
                folder = "/".join(parts[:count])
                if folder in self.files:
                    raise ValueError(f"files: {folder!r} cannot be a file and the folder of {path!r}")
        return self

    @property
    def holds(self) -> Needs:
        """``needs`` where they are given, else what its own limits allow it to take."""
        return self.needs or Needs(cpus=self.cpus or 0.0, memory_mb=self.memory_mb or 0)


class SubprocessSpec(BoxSpec, frozen=True):
    """Processes of this machine, as this user, in a folder of their own."""

    kind: Literal["subprocess"] = "subprocess"


class SandboxSpec(BoxSpec, frozen=True):
    """A bubblewrap sandbox: its own processes, a read-only root, no network."""

    kind: Literal["sandbox"] = "sandbox"


def words_of(error: ValidationError, kind: str, known: Sequence[str]) -> str:
    """Of a spec that does not validate, on one line; ``known``: the fields of its kind."""
    faults: list[str] = []
    for fault in error.errors(include_url=False):
        inner = fault.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):  # of a spec inside, or of this one's own constructor
            faults.append(inner.message)
            continue
        place = ".".join(str(part) for part in fault["loc"] if part != kind)
        if fault["type"] == "extra_forbidden":
            near = did_you_mean(place, known) or f"there are {', '.join(known)}"
            faults.append(f"{place}: there is no such field" + ("" if "." in place else f"; {near}"))
            continue
        faults.append((f"{place}: " if place else "") + fault["msg"].removeprefix("Value error, "))
    said = "; ".join(faults)
    return said if said.startswith("resource kind ") else f"resource kind {kind!r}: {said}"
