"""``@tool``: a function or method that a model may call, with what it needs and what its calls may take.

    @tool
    def add(a: int, b: int) -> int:
        "Add two whole numbers."
        return a + b

    @tool(resources={"box": SandboxSpec()}, timeout_s=20)
    async def run_tests(path: str, box: Box) -> str: ...

A decorated function still is that function to the code that calls it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar, overload

from wingbeat.client import Episode, TeamEpisode
from wingbeat.resources import Spec
from wingbeat.tools.arguments import Arguments, SchemaArguments, SchemaRefused
from wingbeat.tools.docstrings import read_docstring
from wingbeat.tools.results import ToolRefused, checked_limit
from wingbeat.tools.signatures import Refuse, annotation_of, derive_arguments

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What OpenAI's API takes as the name of a function."""

EPISODES = (Episode, TeamEpisode)
"""A parameter of such a type gets the running episode."""

ClassT = TypeVar("ClassT", bound=type)


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """How calls of one tool run."""

    timeout_s: float | None = 60.0
    """Of one try.  None: as long as it takes."""
    retries: int = 0
    """After a failure of infrastructure that says it may be tried again; nothing else is ever repeated."""
    max_output_chars: int = 20_000
    """Of an observation; what is longer loses its middle."""
    infrastructure: tuple[type[BaseException], ...] = ()
    """Exceptions of its own code that are no answer for the model; ``TimeoutError`` stands for its time-out, too."""
    in_order: bool = True
    """Calls of one turn that share its state wait for one another.  False: it does not mind."""


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """Something that a model may call.

    ``state`` is what its calls share and change (a class's instance, leased boxes): calls of one turn that have some in
    common run one after another, in the order in which the model made them.
    """

    name: str
    description: str
    arguments: Arguments
    function: Callable[..., Any]
    options: ToolOptions = ToolOptions()
    resources: Mapping[str, Spec] = field(default_factory=lambda: MappingProxyType({}))
    """Name -> what is leased under it for each episode."""
    fills: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Parameter -> name of the resource that it gets."""
    episode_parameters: tuple[str, ...] = ()
    is_method: bool = False
    """And not bound to an instance yet."""
    state: tuple[object, ...] = ()

    @property
    def schema(self) -> dict[str, Any]:
        """As an entry of ``tools`` in OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": self.arguments.schema}
        return {"type": "function", "function": function}

    @property
    def needs_episode(self) -> bool:
        """Whether it can only be called between ``Toolbox.for_episode`` and its end."""
        return bool(self.resources or self.episode_parameters or self.is_method)

    @staticmethod
    def of_schema(
        function: Callable[..., Any],
        *,
        name: str,
        description: str,
        parameters: dict[str, Any],
        options: ToolOptions = ToolOptions(),
    ) -> Tool:
        """A tool whose JSON schema is given; ``function`` gets what matches it as keyword arguments.

        Raises ToolRefused, DependencyMissing without the ``jsonschema`` library.
        """
        refuse = _refuser(name)
        try:
            arguments = SchemaArguments(parameters)
        except SchemaRefused as error:
            raise refuse(str(error)) from error
        return Tool(
            _checked_name(name, refuse),
            description,
            arguments,
            function,
            _checked_options(options, refuse),
        )

    def renamed(self, name: str) -> Tool:
        """The same tool under another name.  Raises ToolRefused."""
        return replace(self, name=_checked_name(name, _refuser(name)))

    def bound(self, instance: object, *held: object) -> Tool:
        """A method's tool, of one instance, and of the resources that the instance holds."""
        function = functools.partial(self.function, instance)
        return replace(self, function=function, is_method=False, state=(*self.state, instance, *held))

    def filled(self, values: Mapping[str, Any], episode: Any) -> Tool:
        """With its resources and its episode in their parameters."""
        held = {parameter: values[name] for parameter, name in self.fills.items()}
        given = held | dict.fromkeys(self.episode_parameters, episode)
        if not given:
            return self
        return replace(
            self,
            function=functools.partial(self.function, **given),
            resources=MappingProxyType({}),
            fills=MappingProxyType({}),
            episode_parameters=(),
            state=(*self.state, *held.values()),
        )

    def leasing(self, name: str, spec: Spec) -> Tool:
        """Its only resource under another name, or of another spec."""
        ((parameter, _),) = self.fills.items()
        return replace(self, resources=MappingProxyType({name: spec}), fills=MappingProxyType({parameter: name}))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function itself, as other code does."""
        return self.function(*arguments, **named)

    def __get__(self, instance: object | None, owner: type | None = None) -> Tool:
        return self if instance is None or not self.is_method else self.bound(instance)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


@dataclass(frozen=True, slots=True)
class ClassNeeds:
    """What ``__init__`` of a class with tools gets for each episode."""

    resources: Mapping[str, Spec]
    episode_parameters: tuple[str, ...]


_NEEDS = "__wingbeat_tool_needs__"


def needs_of(cls: type) -> ClassNeeds:
    """As declared with ``@tool(resources=...)`` on the class or on what it inherits from.  Raises ToolRefused."""
    declared = getattr(cls, _NEEDS, None)
    return _class_needs(cls, dict(declared.resources) if isinstance(declared, ClassNeeds) else {})


def methods_of(cls: type) -> tuple[Tool, ...]:
    """The tools among a class's attributes, inherited ones too, in the order in which they were written."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    found = [inspect.getattr_static(cls, name) for name in names]
    return tuple(value for value in found if isinstance(value, Tool))


@overload
def tool(target: ClassT) -> ClassT: ...  # pyright: ignore[reportOverlappingOverload]  (a class is callable, too)
@overload
def tool(target: Callable[..., Any]) -> Tool: ...
@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    timeout_s: float | None = 60.0,
    retries: int = 0,
    max_output_chars: int = 20_000,
    infrastructure: tuple[type[BaseException], ...] = (),
    in_order: bool = True,
    resources: Mapping[str, Spec] | None = None,
) -> Callable[[Any], Any]: ...
def tool(
    target: Any = None,
    *,
    name: str = "",
    description: str = "",
    resources: Mapping[str, Spec] | None = None,
    **options: Any,
) -> Any:
    """Offer a function, or the decorated methods of a class, to a model.

    ``name`` and ``description`` default to those of the function and its docstring.  ``resources`` names parameters
    and what is leased for them for each episode; they are no arguments of the model.  The other options are the fields
    of :class:`ToolOptions`.  On a class, only ``resources`` has a meaning: they go to its ``__init__``.

    Raises ToolRefused where a schema cannot be derived, and says what to change.
    """
    if target is None:
        return functools.partial(tool, name=name, description=description, resources=resources, **options)
    held = dict(resources or {})
    if isinstance(target, type):
        if name or description or options:
            raise _refuser(target.__qualname__)("a class takes only resources; write the rest on its methods")
        setattr(target, _NEEDS, _class_needs(target, held))
        return target
    refuse = _refuser(name or getattr(target, "__qualname__", repr(target)))
    return _tool_of(target, name, description, held, _checked_options(ToolOptions(**options), refuse), refuse)


def _tool_of(
    target: Any, name: str, description: str, held: dict[str, Spec], options: ToolOptions, refuse: Refuse
) -> Tool:
    is_method = _is_method(target, refuse)
    docstring = read_docstring(target, refuse=refuse)
    if not (description or docstring.text):
        raise refuse("it has no docstring: say in one what it does, or pass description=...; the model reads it")
    arguments, episode_parameters = derive_arguments(
        target,
        is_method=is_method,
        filled=_checked_resources(held, refuse),
        injected=_is_episode,
        description=docstring,
        refuse=refuse,
    )
    return Tool(
        name=_checked_name(name or target.__name__, refuse),
        description=description or docstring.text,
        arguments=arguments,
        function=target,
        options=options,
        resources=MappingProxyType(held),
        fills=MappingProxyType({name: name for name in held}),
        episode_parameters=episode_parameters,
        is_method=is_method,
    )


def _is_method(target: Any, refuse: Refuse) -> bool:
    """Whether a function was written in the body of a class."""
    if not inspect.isfunction(target):
        raise refuse(f"expected a function or a class, got a {type(target).__name__}")
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise refuse("it yields: expected a function that returns its observation")
    scope = target.__qualname__.rpartition(".")[0]
    if not scope or scope.endswith("<locals>"):
        return False
    if next(iter(inspect.signature(target).parameters), "") != "self":
        raise refuse("expected `self` as the first parameter of a method; make a static method a plain function")
    return True


def _class_needs(cls: type, held: dict[str, Spec]) -> ClassNeeds:
    refuse = _refuser(cls.__qualname__)
    if not methods_of(cls):
        raise refuse("it has no tools: decorate those of its methods that a model may call with @tool")
    episode: list[str] = []
    parameters = dict(inspect.signature(cls).parameters)
    for parameter in parameters.values():
        if parameter.name in held or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if _takes_episode(cls, parameter, refuse):
            episode.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise refuse(
                f"nothing is there for parameter {parameter.name!r} of __init__: declare it in resources={{...}}"
            )
    if missing := _checked_resources(held, refuse) - set(parameters):
        raise refuse(f"expected a parameter of __init__ for each resource, got none for {', '.join(sorted(missing))}")
    return ClassNeeds(MappingProxyType(held), tuple(episode))


def _takes_episode(cls: type, parameter: inspect.Parameter, refuse: Refuse) -> bool:
    if parameter.annotation is parameter.empty:
        return False
    try:
        return _is_episode(annotation_of(cls.__init__, parameter, refuse))
    except ToolRefused:
        return False  # of a type that is not there; only one that has a default may be of any type


def _is_episode(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, EPISODES)


def _checked_resources(held: Mapping[str, Any], refuse: Refuse) -> set[str]:
    for name, spec in held.items():
        if not isinstance(spec, Spec):
            raise refuse(f"resources: expected a Spec for {name!r}, got {type(spec).__name__}")
    return set(held)


def _checked_name(name: str, refuse: Refuse) -> str:
    if not NAME.fullmatch(name):
        raise refuse(f"its name: expected 1 to 64 letters, digits, _ or -, got {name!r}; pass name=...")
    return name


def _checked_options(options: ToolOptions, refuse: Refuse) -> ToolOptions:
    if options.timeout_s is not None and not options.timeout_s > 0:
        raise refuse(f"timeout_s: expected a number above 0 or None, got {options.timeout_s!r}")
    if options.retries < 0:
        raise refuse(f"retries: expected 0 or more, got {options.retries}")
    checked_limit(options.max_output_chars, refuse=refuse)
    return options


def _refuser(name: str) -> Refuse:
    return lambda reason: ToolRefused(f"tool {name}: {reason}")
