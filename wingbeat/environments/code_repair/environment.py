"""Code repair: an agent with a shell and file tools edits a broken repository in a sandbox.

The sandbox is leased for the episode; what the agent left in it is what hidden cases then judge (:mod:`.judge`).  Every
episode begins with a fresh sandbox: nothing that one agent did can help another.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from wingbeat import Task
from wingbeat.environments import Options, OutOfContext, ask, read_options, read_split
from wingbeat.environments.code_repair.actions import act, has_action, instructions
from wingbeat.environments.code_repair.judge import score_box
from wingbeat.environments.code_repair.mutations import KINDS
from wingbeat.environments.code_repair.programs import programs
from wingbeat.environments.code_repair.tasks import SOURCE, chosen_bugs, split_bugs, to_task
from wingbeat.resources import BoxSpec, ResourceFailed, SandboxSpec, SubprocessSpec
from wingbeat.tools import EpisodeTools, Toolbox, file_tools, shell_tool

if TYPE_CHECKING:
    from wingbeat import Episode
    from wingbeat.resources import Box

logger = logging.getLogger("wingbeat.environments")

LEAST_MEMORY_MB = 128
DISK_MB = 64
"""Of a sandbox's files."""
ANSWERS = str(Path(__file__).resolve().with_name("index.json"))
"""What no agent may read; it lies where Wingbeat is installed."""
SHOWN, NO_GIT = 77, 78
"""Exit codes of BEGIN: the box shows the answers; it has no git, and its files lie in a plain folder."""
BEGIN = (
    '[ -z "$ANSWERS" ] || [ ! -e "$ANSWERS" ] || exit 77; '
    "command -v git >/dev/null 2>&1 || exit 78; "
    "git init -q . && git add -A && "
    "git -c user.name=wingbeat -c user.email=wingbeat@localhost commit -q -m 'As it is'"
)
"""Makes the folder a git repository with one commit."""


class CodeRepairOptions(Options):
    """Which bugs, what the agent may do, and how it is scored."""

    seed: int = Field(default=0, ge=0, description="Draws the split and the order of tasks.")
    held_out: Literal["pairs", "programs"] = Field(
        default="pairs", description="What is held out: kinds of bugs of each program, or whole programs."
    )
    programs: list[str] | None = Field(default=None, min_length=1, description="Base programs; unset: all.")
    kinds: list[str] | None = Field(default=None, min_length=1, description="Kinds of bugs; unset: all.")
    reward: Literal["all", "share"] = Field(
        default="all", description="1 if every hidden case is right, else 0; or the share of right ones."
    )
    box: Literal["sandbox", "subprocess"] = Field(
        default="sandbox", description="Where the agent works; `subprocess` keeps nothing from this machine."
    )
    actions: Literal["tools", "text"] = Field(
        default="tools", description="Tool calls of the API, or action blocks in the text."
    )
    max_turns: int = Field(default=20, ge=1, description="Model calls of an episode.")
    max_tokens: int | None = Field(default=None, ge=1, description="Of a reply; unset: what the policy allows.")
    command_timeout_s: float = Field(default=20.0, gt=0, description="Of one command in the sandbox.")
    memory_mb: int = Field(default=256, ge=0, description="Of the sandbox; 0: no limit, where none can be held.")

    @field_validator("memory_mb")
    @classmethod
    def _files_fit_into_memory(cls, value: int) -> int:
        if 0 < value < LEAST_MEMORY_MB:
            raise ValueError(f"expected 0, or at least {LEAST_MEMORY_MB}: files are kept in memory, too")
        return value

    @field_validator("programs")
    @classmethod
    def _programs_are_there(cls, names: list[str] | None) -> list[str] | None:
        return known_names(names, list(programs()))

    @field_validator("kinds")
    @classmethod
    def _kinds_are_there(cls, names: list[str] | None) -> list[str] | None:
        return known_names(names, list(KINDS))


class CodeRepairEnvironment:
    """Repositories with one bug each."""

    name = SOURCE

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = read_options(CodeRepairOptions, options or {}, environment=self.name)
        bugs = chosen_bugs(self.options.programs, self.options.kinds)
        train, heldout = split_bugs(bugs, seed=self.options.seed, held_out=self.options.held_out)
        self._tasks = {"train": tuple(map(to_task, train)), "eval": tuple(map(to_task, heldout))}
        self._told_no_git = False
        self.spec = box_spec(self.options)
        """What an episode leases."""
        self.toolbox = Toolbox([shell_tool(self.spec), *file_tools(self.spec)])
        """What the agent works with, all of it in one sandbox, leased as ``box``."""

    def tasks(self, split: str) -> Sequence[Task]:
        """No program has the same kind of bug in both splits."""
        return self._tasks[read_split(split).value]

    def score(self, task: Task, answer: str) -> float:
        """0: nothing that an agent says repairs a repository; see :meth:`score_box`."""
        return 0.0

    def solution(self, task: Task) -> dict[str, str]:
        """Path -> text of the module that has the bug, without it."""
        modules = programs()[task.payload["program"]].modules
        return {path: text for path, text in modules.items() if task.payload["files"][path] != text}

    async def place(self, task: Task, box: Box) -> None:
        """Put a task's repository into an empty box.

        Raises ResourceFailed for a sandbox in which the answers could be read, and where git fails.
        """
        for path, text in task.payload["files"].items():
            await box.write(path, text.encode())
        answers = ANSWERS if self.options.box == "sandbox" else ""
        done = await box.run(BEGIN, env={"ANSWERS": answers})
        if done.exit_code == SHOWN:
            raise ResourceFailed(
                f"the sandbox shows its agents the answers, at {ANSWERS}; install Wingbeat where sandboxes do not see"
                " it, such as a virtual environment outside of /usr"
            )
        if done.exit_code not in (0, NO_GIT):
            words = (done.stopped_by or done.stderr.decode("utf-8", "replace").strip())[-500:]
            raise ResourceFailed(f"the repository of {task.id} cannot be made: {words or done.exit_code}")
        if done.exit_code == NO_GIT and not self._told_no_git:
            self._told_no_git = True
            logger.warning("%s: there is no git in its boxes, so repositories are plain folders", self.name)

    async def score_box(self, task: Task, box: Box) -> float:
        """The reward of what is in ``box`` now.  Raises ResourceFailed if that cannot be found out."""
        share = await score_box(box, programs()[task.payload["program"]])
        return share if self.options.reward == "share" else float(share == 1.0)

    async def play(self, episode: Episode) -> float:
        """Let the policy work until it answers without acting, or its turns are used up; then score.

        The sandbox starts while the policy reads the question.
        """
        episode.prefetch(self.spec)
        messages: list[dict[str, Any]] = [{"role": "user", "content": episode.task.payload["question"]}]
        if self.options.actions == "text":
            messages.insert(0, {"role": "system", "content": instructions(self.toolbox.schemas())})
        with contextlib.suppress(OutOfContext):
            await self._ask(episode, messages)
        async with self.toolbox.for_episode(episode) as tools:
            box: Box = tools.lease("box").value
            await self.place(episode.task, box)
            with contextlib.suppress(OutOfContext):  # what it did until then counts
                await self._work(episode, messages, tools)
            return await self.score_box(episode.task, box)

    async def _work(self, episode: Episode, messages: list[dict[str, Any]], tools: EpisodeTools) -> None:
        """Do what the last reply says and ask again, until one says nothing to do."""
        for turn in range(1, self.options.max_turns + 1):
            observed = await self._observe(messages[-1], tools)
            if not observed or turn == self.options.max_turns:
                return
            messages += observed
            await self._ask(episode, messages)

    async def _ask(self, episode: Episode, messages: list[dict[str, Any]]) -> None:
        schemas = self.toolbox.schemas() if self.options.actions == "tools" else None
        reply = await ask(episode, messages, tools=schemas, max_tokens=self.options.max_tokens)
        messages.append(reply.model_dump(exclude_none=True))

    async def _observe(self, reply: dict[str, Any], tools: EpisodeTools) -> list[dict[str, Any]]:
        """What came of a reply's actions; [] where it has none."""
        if self.options.actions == "tools":
            return await tools.answer(reply.get("tool_calls"))
        text = str(reply.get("content") or "")
        return [{"role": "user", "content": (await act(text, tools)).content}] if has_action(text) else []


def known_names(names: list[str] | None, known: Sequence[str]) -> list[str] | None:
    """The names, all of them known.  Raises ValueError."""
    unknown = next((name for name in names or () if name not in known), None)
    if unknown is not None:
        raise ValueError(f"there is no {unknown!r}; there are {', '.join(known)}")
    return names


def box_spec(options: CodeRepairOptions) -> BoxSpec:
    """What an episode leases: a fresh, empty box, so that one that was started ahead serves any task."""
    shared: dict[str, Any] = {
        "label": SOURCE,
        "env": {"PYTHONDONTWRITEBYTECODE": "1"},
        "memory_mb": options.memory_mb or None,
        "command_timeout_s": options.command_timeout_s,
    }
    if options.box == "subprocess":
        return SubprocessSpec(network=True, file_mb=64, **shared)
    return SandboxSpec(pids=64, disk_mb=DISK_MB, **shared)
