"""Built-in tasks and adapters to public environment libraries.

An environment makes tasks and scores answers; agents run elsewhere.  :func:`make_environment` builds
one from its name in the configuration, :func:`load_tasks_file` reads a user's own tasks.
"""

from wingbeat.environments.calculator_environment import CalculatorEnvironment
from wingbeat.environments.reasoning_gym import ReasoningGymEnvironment
from wingbeat.environments.registry import environment_names, make_environment
from wingbeat.environments.tasks_file import TasksFile, load_tasks_file

__all__ = [
    "CalculatorEnvironment",
    "ReasoningGymEnvironment",
    "TasksFile",
    "environment_names",
    "load_tasks_file",
    "make_environment",
]
