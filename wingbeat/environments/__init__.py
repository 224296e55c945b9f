"""Environments: tasks, how an agent plays them, and what it earns; built-in ones and adapters to public libraries.

:func:`make_environment` builds one from its name in the configuration (a third party's by its import path, too),
:func:`load_tasks_file` reads a user's own tasks.  Libraries that an environment needs load when it is made.
"""

from wingbeat.environments.asking import Conversation, OutOfContext, ask, client_of
from wingbeat.environments.calculator_environment import CalculatorEnvironment
from wingbeat.environments.kinds import Kind, without_variant
from wingbeat.environments.options import Options, read_options, read_split
from wingbeat.environments.reasoning_gym import ReasoningGymEnvironment
from wingbeat.environments.registry import environment_names, make_environment
from wingbeat.environments.single_turn import SingleTurn
from wingbeat.environments.tasks_file import TasksFile, load_tasks_file
from wingbeat.environments.tiny_recipes import Message, TinyRecipe

__all__ = [
    "CalculatorEnvironment",
    "Conversation",
    "Kind",
    "Message",
    "Options",
    "OutOfContext",
    "ReasoningGymEnvironment",
    "SingleTurn",
    "TasksFile",
    "TinyRecipe",
    "ask",
    "client_of",
    "environment_names",
    "load_tasks_file",
    "make_environment",
    "read_options",
    "read_split",
    "without_variant",
]
