"""Commands through the shipped application: help, configuration, projects, errors."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wingbeat import __version__
from wingbeat.cli.evaluate import environment_config
from wingbeat.cli.init import scaffold
from wingbeat.cli.main import app
from wingbeat.cli.program import program
from wingbeat.client import Swarm, load_agent
from wingbeat.core.config import Config, load_config
from wingbeat.core.errors import SetupError
from wingbeat.core.protocol import EvaluationReply, ScoreReply
from wingbeat.dataflow.evaluation import EvaluationResult, EvaluationSpec, SourceScore
from wingbeat.deploy.training import TrainingResult
from wingbeat.environments import load_tasks_file
from wingbeat.environments.calculator import DEMO_PRESET

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

MINIMAL = '[policies.solver]\nmodel = "builtin:calculator"\n'


@pytest.fixture
def cli() -> CliRunner:
    return CliRunner()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(MINIMAL)
    return path


def test_version_and_help(cli: CliRunner) -> None:
    assert cli.invoke(app, ["version"]).output.strip() == __version__
    listed = cli.invoke(app, ["--help"]).output
    for command in ("demo", "init", "serve", "train", "rollout", "eval", "inspect", "export", "doctor", "version"):
        assert command in listed
        done = cli.invoke(app, [command, "--help"])
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", ["train", "serve"])
@pytest.mark.parametrize("order", ["after", "before", "between"])
def test_dry_run_prints_what_would_run(cli: CliRunner, config: Path, command: str, order: str) -> None:
    overrides = ["--run.steps=7", "--policies.solver.trainer.learning-rate=0.5"]
    arguments = {
        "after": [str(config), *overrides, "--dry-run"],
        "before": ["--dry-run", *overrides, str(config)],
        "between": [overrides[0], str(config), "--dry-run", overrides[1]],
    }[order]
    done = cli.invoke(app, [command, *arguments])
    assert done.exit_code == 0, done.output
    printed = tomllib.loads(done.output)
    assert printed["run"]["steps"] == 7
    assert printed["policies"]["solver"]["trainer"]["learning_rate"] == 0.5
    again = config.with_name("again.toml")
    again.write_text(done.output)
    assert load_config(again) == load_config(config, overrides)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["CONFIG", "--run.stpes=7"], "did you mean 'steps'?"),
        (["CONFIG", "--run.steps", "7"], "write --run.steps=7"),
        (["CONFIG", "--server.port"], "write --server.port=VALUE"),
        (["CONFIG", "--port", "9999"], "did you mean one of --server.port=9999"),
        (["CONFIG", "--steps=3"], "write --run.steps=3"),
        (["CONFIG", "--prot", "3"], "unknown option --prot; did you mean --server.port=3?"),
        (["CONFIG", "--dry-rum"], "unknown option --dry-rum; did you mean --dry-run?"),
        (["CONFIG", "--threads", "2"], "--engine.threads=2"),
        (["CONFIG", "--zzzz"], "unknown option --zzzz; settings look like --section.key=value"),
        (["CONFIG", "--policies.sover.context_tokens=64"], "no policy 'sover'; did you mean 'solver'?"),
        (["CONFIG", "--server.host=0.0.0.0"], "set server.admin_key"),
        (["CONFIG", "-x"], "--section.key=value"),
        (["CONFIG", "CONFIG"], "expected one configuration file"),
        (["nothing.toml"], "wingbeat init"),
        ([], "wingbeat init"),
        (["--run.steps=3"], "policies"),
        (["--resume", "nowhere"], "config.toml"),
    ],
)
@pytest.mark.parametrize("command", ["train", "serve"])
def test_configuration_faults_are_one_line(
    cli: CliRunner, config: Path, command: str, arguments: list[str], says: str
) -> None:
    done = cli.invoke(app, [command, *(str(config) if a == "CONFIG" else a for a in arguments), "--dry-run"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize("command", ["train", "serve"])
def test_the_configuration_here_is_taken_where_none_is_named(
    cli: CliRunner, config: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    done = cli.invoke(app, [command, "--run.steps=3", "--dry-run"])
    assert tomllib.loads(done.output)["run"]["steps"] == 3
    named = cli.invoke(app, [command, "config.toml", "--run.steps=3", "--dry-run"])
    assert done.output == named.output


def test_overrides_may_make_a_policy(cli: CliRunner, config: Path) -> None:
    more = ["--policies.judge.model=builtin:calculator", "--policies.judge.trainable=false"]
    done = cli.invoke(app, ["train", str(config), *more, "--dry-run"])
    assert sorted(tomllib.loads(done.output)["policies"]) == ["judge", "solver"]


def test_resume_reads_the_run_s_configuration(cli: CliRunner, config: Path) -> None:
    done = cli.invoke(app, ["train", "--resume", str(config.parent), "--dry-run"])
    assert tomllib.loads(done.output)["policies"]["solver"]["model"] == "builtin:calculator"


@pytest.mark.parametrize("command", ["train", "serve"])
def test_resuming_what_is_no_run_is_one_line(cli: CliRunner, config: Path, command: str) -> None:
    done = cli.invoke(app, [command, str(config), "--resume", str(config.parent / "nowhere")])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "expected a run directory" in done.stderr


@pytest.mark.parametrize("command", [["demo"], ["train", "CONFIG"], ["serve", "CONFIG"], ["inspect", "."]])
def test_the_light_client_tells_what_a_command_lacks(config: Path, command: list[str]) -> None:
    """``pip install .`` has no msgspec, among others: one line, no traceback."""
    arguments = [str(config) if part == "CONFIG" else part for part in command]
    code = (
        "import sys\nfrom importlib import metadata\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'msgspec': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "version = metadata.version\n"
        "def without(name):\n"
        "    if name == 'msgspec': raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = without\n"
        "from wingbeat.cli.main import main\nsys.argv = ['wingbeat', *sys.argv[1:]]\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=config.parent,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert "msgspec" in done.stderr
    assert "pip install '.[server]'" in done.stderr


def test_a_stopped_server_says_how_to_go_on(cli: CliRunner, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = config.parent / "runs" / "r"

    def run_server(config: Config, config_dir: Path, **more: Any) -> Path:
        more["on_note"]("preparing [a] model")
        return run_dir

    monkeypatch.setattr("wingbeat.deploy.local.run_server", run_server)
    for left in (" before it served", f"; continue with {program()} serve --resume {run_dir}"):
        done = cli.invoke(app, ["serve", str(config)])
        assert done.exit_code == 0, done.output
        assert done.stderr == f"preparing [a] model\nstopped{left}\n"
        run_dir.mkdir(parents=True, exist_ok=True)


def test_a_trained_model_is_named_by_its_folder(cli: CliRunner, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(MINIMAL + '[policies.judge]\nmodel = "builtin:calculator"\ntrainable = false\n')
    result = TrainingResult(config.parent, complete=True, summary={}, evaluations=(), wall_s=1.0)
    monkeypatch.setattr("wingbeat.deploy.training.run_plan", lambda plan: result)
    done = cli.invoke(app, ["train", str(config)])
    assert [line for line in done.stdout.splitlines() if "trained model" in line] == [
        f"trained model: {config.parent / 'export' / 'solver'}"
    ]


def test_init_makes_a_project_that_loads(cli: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    project = tmp_path / "my-agent"
    done = cli.invoke(app, ["init", str(project)])
    assert done.exit_code == 0, done.output
    assert f"cd {project} && {program()} train config.toml" in done.output
    config = load_config(project / "config.toml")
    assert config.run.name == "my-agent"
    assert config.run.steps == DEMO_PRESET.steps
    assert config.policies["solver"].model == "builtin:calculator"
    assert config.policies["solver"].trainer.learning_rate == DEMO_PRESET.learning_rate
    assert config.dataflow.group_size == DEMO_PRESET.group_size
    assert (config.agent.path, config.tasks.file) == ("agent.py", "tasks.py")
    assert load_agent(str(project / "agent.py")).name == "solve"
    tasks = load_tasks_file(project / "tasks.py")
    assert (len(tasks.train), len(tasks.eval)) == (195, 105)
    assert (project / "README.md").read_text().startswith("# my-agent\n")
    assert cli.invoke(app, ["train", str(project / "config.toml"), "--dry-run"]).exit_code == 0


@pytest.mark.parametrize("algorithm", ["gspo", "sapo", "m2po", "cispo"])
def test_a_new_project_sets_nothing_that_is_of_one_algorithm(cli: CliRunner, tmp_path: Path, algorithm: str) -> None:
    project = tmp_path / "p"
    cli.invoke(app, ["init", str(project)])
    changed = f"--policies.solver.trainer.algorithm={algorithm}"
    done = cli.invoke(app, ["train", str(project / "config.toml"), changed, "--dry-run"])
    assert done.exit_code == 0, done.output
    trainer = load_config(project / "config.toml").policies["solver"].trainer
    defaults = type(trainer)()
    assert all(getattr(trainer, key) != getattr(defaults, key) for key in trainer.model_fields_set)


def test_training_without_a_policy_that_trains_is_refused(cli: CliRunner, config: Path) -> None:
    done = cli.invoke(app, ["train", str(config), "--policies.solver.trainable=false", "--dry-run"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no policy trains" in done.stderr
    assert cli.invoke(app, ["serve", str(config), "--policies.solver.trainable=false", "--dry-run"]).exit_code == 0


def test_a_dry_run_looks_for_the_agent(cli: CliRunner, config: Path) -> None:
    done = cli.invoke(app, ["train", str(config), "--agent.path=none.py", "--dry-run"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "agent.path: no file" in done.stderr


def test_init_never_overwrites(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = cli.invoke(app, ["init", str(tmp_path)])
    assert (done.exit_code, sorted(path.name for path in tmp_path.iterdir())) == (2, ["notes.txt"])
    assert "new or empty folder" in done.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli.invoke(app, ["init", str(empty)]).exit_code == 0


def test_odd_folder_names_still_give_a_valid_run_name(tmp_path: Path) -> None:
    scaffold(tmp_path / "my agent!", preset=DEMO_PRESET)
    assert load_config(tmp_path / "my agent!" / "config.toml").run.name == "run"


def test_init_tells_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot write"):
        scaffold(tmp_path / "file" / "project", preset=DEMO_PRESET)


def test_rollout_tells_faults_of_the_agent_file(cli: CliRunner, tmp_path: Path) -> None:
    done = cli.invoke(app, ["rollout", str(tmp_path / "agent.py")])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: expected the agent file")


def test_eval_without_a_server_is_one_line(cli: CliRunner, unused_tcp_port: int) -> None:
    done = cli.invoke(app, ["eval", "--server", f"localhost:{unused_tcp_port}"])
    assert done.exit_code == 1
    assert "expected a server URL" in done.stderr


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wingbeat.cli", "train", "nothing.toml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no configuration file")
    assert "Traceback" not in done.stderr


def test_commands_load_nothing_heavy() -> None:
    code = (
        "import sys, json, wingbeat.cli.main\n"
        "names = ('torch', 'transformers', 'openai', 'numpy', 'fastapi', 'reasoning_gym')\n"
        "sys.stdout.write(json.dumps([name for name in names if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("command", "begun", "fresh"),
    [
        ("train", "interrupted; continue with --resume", "interrupted before the run began; nothing is left of it"),
        ("demo", "the demo was interrupted; what it did so far is in", "the demo was interrupted before it began"),
    ],
)
def test_an_interrupted_run_is_no_error(
    cli: CliRunner, config: Path, monkeypatch: pytest.MonkeyPatch, command: str, begun: str, fresh: str
) -> None:
    pytest.importorskip("openai")
    result = TrainingResult(config.parent / "run", complete=False, summary={}, evaluations=(), wall_s=1.0)
    module = "wingbeat.cli.demo" if command == "demo" else "wingbeat.deploy.training"
    monkeypatch.setattr(f"{module}.run_plan", lambda plan: result)
    arguments = [command, *([str(config)] if command == "train" else [])]
    early = cli.invoke(app, arguments)
    assert (early.exit_code, early.stdout) == (130, "") and fresh in early.stderr
    result.run_dir.mkdir()
    late = cli.invoke(app, arguments)
    assert late.exit_code == 130 and f"{begun} {result.run_dir}" in " ".join(late.stderr.split())


def test_results_show_names_that_look_like_markup(
    cli: CliRunner, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {"[/b]": SourceScore(0.5, None, 1), "[red]": SourceScore(0.25, None, 1)}
    spec = EvaluationSpec("before-solver-0-1", "solver", 0, name="before")
    done = EvaluationResult(spec, True, 2, 2, {}, 0.375, None, {}, sources=scores)
    result = TrainingResult(config.parent / "[x]", complete=True, summary={}, evaluations=(done,), wall_s=1.0)
    monkeypatch.setattr("wingbeat.deploy.training.run_plan", lambda plan: result)
    said = cli.invoke(app, ["train", str(config)]).stdout
    assert "[/b]" in said and "[red]" in said and f"{config.parent}/[x]/export/solver" in said


def test_an_evaluation_shows_names_that_look_like_markup(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {name: ScoreReply(mean_reward=0.5, stderr=None, num_tasks=1) for name in ("[/b]", "[red]")}
    reply = EvaluationReply(
        evaluation_id="e", policy="p", version=0, state="done", num_expected=2, num_finished=2, sources=sources
    )
    monkeypatch.setattr(Swarm, "evaluate", lambda *args, **more: reply)
    result = cli.invoke(app, ["eval"])
    assert result.exit_code == 0 and "[/b]" in result.output and "[red]" in result.output


# --- environments -----------------------------------------------------------------------------


def test_init_of_an_environment_writes_what_trains_on_it(cli: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    project = tmp_path / "sums"
    done = cli.invoke(app, ["init", str(project), "--environment", "calculator"])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in project.iterdir()) == ["README.md", "config.toml"]
    config = load_config(project / "config.toml")
    assert (config.run.name, config.agent.path, config.tasks.environment) == ("sums", "builtin", "calculator")
    assert "wingbeat eval --environment calculator" in (project / "README.md").read_text()
    assert cli.invoke(app, ["train", str(project / "config.toml"), "--dry-run"]).exit_code == 0
    refused = cli.invoke(app, ["init", str(tmp_path / "x"), "--environment", "calculatr"])
    assert (refused.exit_code, (tmp_path / "x").exists()) == (2, False)
    assert "did you mean calculator?" in refused.stderr


def test_init_takes_options_of_the_environment(cli: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    lake, games = tmp_path / "lake", ["--environment", "game", "--options", "max_heap=4"]
    done = cli.invoke(app, ["init", str(lake), *games, "--options", "illegal=ask_again"])
    assert done.exit_code == 0, done.output
    options = load_config(lake / "config.toml").tasks.options
    assert options == {"num_heaps": 2, "max_heap": 4, "illegal": "ask_again"}, "over those of the preset"
    named = """--environment game --options max_heap=4 --options 'illegal="ask_again"'"""
    assert named in (lake / "README.md").read_text()
    wrong = cli.invoke(app, ["init", str(tmp_path / "x"), "--environment", "game", "--options", "max_heep=1"])
    assert "tasks.options.max_heep" in wrong.stderr
    alone = cli.invoke(app, ["init", str(tmp_path / "x"), "--options", "max_heap=4"])
    assert (alone.exit_code, (tmp_path / "x").exists()) == (2, False)
    assert "--options are of an --environment" in alone.stderr


def test_init_of_an_environment_of_ones_own_names_its_file_as_the_new_folder_sees_it(
    cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    (tmp_path / "own_sums.py").write_text(
        "from wingbeat.environments import CalculatorEnvironment\n\n\nclass Sums(CalculatorEnvironment):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    for folder, seen in ("runs/sums", "../../own_sums.py:Sums"), ("own_sums", "../own_sums.py:Sums"):
        done = cli.invoke(app, ["init", folder, "--environment", "own_sums.py:Sums"])
        assert done.exit_code == 0, done.output
        assert load_config(Path(folder) / "config.toml").tasks.environment == seen
        assert cli.invoke(app, ["train", f"{folder}/config.toml", "--dry-run"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rollout"], "expected a file with an agent, or --environment NAME"),
        (
            ["rollout", "agent.py", "--environment", "calculator"],
            "expected a file with an agent, or --environment NAME",
        ),
        (["rollout", "agent.py", "--options", "seed=1"], "--options are of an --environment"),
        (["rollout", "--environment", "calculator", "--options", "sed=1"], "tasks.options.sed"),
        (["rollout", "--environment", "calculator", "--watch"], "this one is no file"),
        (["eval", "--model", "m"], "--model goes with --environment only"),
        (["eval", "--preset"], "--preset goes with --environment only"),
        (["eval", "--run.seed=1"], "settings are of the server that --environment starts"),
        (["eval", "--environment", "calculator", "--source", "x"], "--source does not go"),
        (["eval", "--environment", "calculator", "--version", "3"], "--version needs --server"),
        (["eval", "--environment", "calculator", "--policy", "x"], "--policy: expected one of solver, got 'x'"),
        (
            ["eval", "--environment", "calculator", "--server", "http://127.0.0.1:9", "--model", "m"],
            "--model does not go",
        ),
        (["eval", "--environment", "nothing"], "expected an environment out of"),
        (["eval", "--environment", "calculator", "--options", "sed=1"], "tasks.options.sed"),
        (["eval", "--environment", "calculator", "--model", "builtin:big"], "unknown built-in model"),
        (["eval", "--environment", "calculator", "--policies.solver.contxt=1"], "contxt"),
        (["eval", "--environment", "calculator", "--sample=3"], "unknown option"),
    ],
)
def test_environments_and_their_options_are_refused_before_anything_starts(
    cli: CliRunner, arguments: list[str], says: str
) -> None:
    pytest.importorskip("openai")
    done = cli.invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trained_tiny_model_asks_for_the_preset_that_it_was_trained_with(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    done = cli.invoke(app, ["eval", "--environment", "calculator", "--model", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    for text in ("only 128 positions", "add --preset", "--policies.solver.context_tokens=128 or less"):
        assert text in done.stderr
    (tmp_path / "config.json").write_text("{")
    torn = cli.invoke(app, ["eval", "--environment", "calculator", "--model", str(tmp_path)])
    assert torn.exit_code == 2 and "expected the configuration of a model in" in torn.stderr


def test_only_a_tiny_model_is_evaluated_with_the_options_of_the_preset() -> None:
    tiny = environment_config("gymnasium:FrozenLake-v1", {"size": 9}, preset=True)
    own = environment_config("gymnasium:FrozenLake-v1", {}, model="org/name")
    trained = environment_config("gymnasium:FrozenLake-v1", {}, model="export/solver", preset=True)
    assert (tiny.tasks.options["map_size"], tiny.tasks.options["size"]) == (3, 9)
    assert (own.tasks.options, own.policies["solver"].context_tokens) == ({}, 4096)
    assert (trained.tasks.options["map_size"], trained.policies["solver"].context_tokens) == (3, 128)
    assert not any(policy.trainable for config in (tiny, own, trained) for policy in config.policies.values())
