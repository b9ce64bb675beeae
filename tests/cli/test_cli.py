"""The command line: every command explains itself, and a slip is answered with the nearest known name."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from splitserve.cli import main
from splitserve.cli.config import SECTIONS, ConfigError
from splitserve.cli.main import cli
from splitserve.cli.options import FILE_ONLY, flag_of
from splitserve.cli.settings import DEMO_MODEL
from splitserve.coordinator.tenants.errors import TenantsFileError
from splitserve.transport.errors import TransportError

COMMANDS = [
    "up",
    "coordinator",
    "prefill",
    "decode",
    "worker",
    "flip",
    "top",
    "chat",
    "completion",
    "keygen",
    "doctor",
    "bench",
    "keys",
    "plan",
    "profile",
    "simulate",
    "trace",
    "usage",
    "version",
]


def splitserve(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPLITSERVE_")}
    command = [sys.executable, "-m", "splitserve.cli.main", *arguments]
    return subprocess.run(
        command, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=200, check=False
    )


def test_all_commands_are_there() -> None:
    assert sorted(cli.commands) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {command}")
    whole = CliRunner().invoke(cli, [command, "--help-all"]) if "--help-all" in result.output else result
    assert whole.exit_code == 0
    for name in SECTIONS[command].model_fields.keys() - FILE_ONLY if command in SECTIONS else ():
        assert flag_of(name) in whole.output


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["prefill", "--max-batch-token", "1"], "--max-batch-tokens"),
        (["up", "--decode-max-num-seq", "1"], "--decode-max-num-seqs"),
        (["up", "--porta", "1"], "No such option '--porta'; did you mean '--port'?"),  # as near: --admin-port
        (["up", "-x"], "No such option '-x'\n"),
        (["up", "ORG/NAME"], "Got unexpected extra argument (ORG/NAME); give a model as --model MODEL"),
        (
            ["serve", "ORG/NAME"],
            "No such command 'serve'. A model is served by `splitserve up --model MODEL`.",
        ),
        (["coordinater"], "Did you mean 'coordinator'? Commands are: up,"),
        (["nothing-like-it"], "Commands are: up, coordinator, prefill,"),
        (["keys", "nothing-like-it"], "Commands are: create, list, rotate,"),
    ],
)
def test_a_misspelt_option_or_command_names_the_nearest(arguments: list[str], near: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert near in result.output


def test_a_wrong_setting_is_one_line_and_status_2() -> None:
    result = splitserve(
        "decode", "--insecure", env={"SPLITSERVE_MODEL": "/m", "SPLITSERVE_MAX_NUM_SEQS": "0"}
    )
    assert result.returncode == 2
    assert result.stderr == (
        "splitserve: SPLITSERVE_MAX_NUM_SEQS: '0' cannot be used: input should be greater than or "
        "equal to 1\n"
    )


def test_a_model_that_is_not_there_is_one_line_and_status_2(tmp_path: Path) -> None:
    result = splitserve("up", "--model", str(tmp_path / "none"))
    assert result.returncode == 2
    assert result.stderr.startswith("splitserve: --model: ")
    assert "none is no folder" in result.stderr
    assert "a model of the hub (ORG/NAME) or s3://BUCKET/PREFIX" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_admin_key_that_is_not_there_is_one_line_and_status_2(tmp_path: Path) -> None:
    key = str(tmp_path / "admin.key")
    result = splitserve(
        "coordinator", "--insecure", "--model", str(DEMO_MODEL), "--port", "0", "--admin-key-file", key
    )
    assert result.returncode == 2
    assert result.stderr == f"splitserve: --admin-key-file: cannot read {key} (No such file or directory)\n"


def test_usage_of_a_database_that_is_not_there_makes_none(tmp_path: Path) -> None:
    error = CliRunner().invoke(cli, ["usage", "--tenants-file", str(tmp_path / "none")]).exception
    assert isinstance(error, TenantsFileError)
    assert "there is no usage database" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_usage_of_a_database_that_does_not_answer_is_one_sentence() -> None:
    pytest.importorskip("psycopg")
    result = splitserve("usage", "--usage-url", "postgresql://usage:hunter2@127.0.0.1:9/db")
    assert result.returncode == 1
    assert result.stderr.startswith("splitserve: --usage-url: connection failed")
    assert "hunter2" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "splitserve.cli.main", "version"]
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, check=False
        )
    assert result.returncode == 1
    assert result.stderr == (
        "splitserve: a file or standard output cannot be written: No space left on device\n"
    )


def test_help_loads_neither_torch_nor_the_server() -> None:
    code = (
        "import sys; import splitserve.cli.main; print([m for m in ('torch', 'uvicorn', 'httpx', "
        "'matplotlib') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_command_names_a_function_that_is_there() -> None:
    names = re.findall(r'"((?:cli|planner|traces)\.[\w.]+:\w+)"', Path(main.__file__).read_text())
    assert len(set(names)) == 21
    assert all(callable(pkgutil.resolve_name(f"splitserve.{name}")) for name in names)


def test_keygen_makes_a_private_key_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    assert CliRunner().invoke(cli, ["keygen", str(path)]).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    again = CliRunner().invoke(cli, ["keygen", str(path)])
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_keygen_changes_a_key_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    CliRunner().invoke(cli, ["keygen", str(path)])
    for step in ("add", "switch", "finish"):
        assert CliRunner().invoke(cli, ["keygen", str(path), "--rotate", step]).exit_code == 0
    assert isinstance(
        CliRunner().invoke(cli, ["keygen", str(path), "--rotate", "finish"]).exception, TransportError
    )


def test_version_names_the_libraries() -> None:
    result = CliRunner().invoke(cli, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith("splitserve ")
    assert "torch" in result.output


def test_keys_are_made_listed_turned_and_ended(tmp_path: Path) -> None:
    env = {"SPLITSERVE_TENANTS_FILE": str(tmp_path / "tenants")}

    def keys(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["keys", *arguments], env=env, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    keys("tier", "--tier", "gold", "--priority-class", "premium", "--tokens-per-minute", "1000")
    first = keys("create", "--tenant", "acme", "--tier", "gold", "--max-streams", "3").strip()
    second = keys("rotate", "--key", "key_1", "--grace-s", "0").strip()
    assert first.startswith("sk-split-")
    assert second.startswith("sk-split-")
    assert first != second
    keys("tenant", "--tenant", "zed", "--shared-cache", "friends")
    listed = keys("list")
    assert all(
        word in listed
        for word in ("gold", "tokens_per_minute 1,000", "acme", "zed", "friends", "key_2", "max_streams 3")
    )
    assert first not in listed
    keys("revoke", "--key", "key_2")
    wrong = splitserve("keys", "revoke", "--key", "key_9", env=env)
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "splitserve: there is no key 'key_9'; `splitserve keys list` shows them\n",
    )


LENGTH = "--max-model-len 99999: the model's context ends at"
FOLDER = "--trace-folder, /proc/traces: No such file or directory; name another place"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max-model-len 99999", LENGTH),
        ("--max-model-len 99999 --processes 2", LENGTH),
        ("--trace-folder /proc/traces", FOLDER),
    ],
)
def test_a_coordinator_that_can_never_serve_says_why_and_ends(options: str, message: str) -> None:
    """None of several processes is started again and again."""
    fixed = ("--insecure", "--model", str(DEMO_MODEL), "--port", "0")
    result = splitserve("coordinator", *fixed, *options.split())
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("splitserve: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trace", "make", "--requests", "5", "--output", "nowhere/trace.jsonl"],
            "--output: there is no folder nowhere; make it first",
        ),
        (["trace", "stats", "t.csv", "--plot-file", "/"], "--plot-file: / is a folder; name a file in it"),
        (
            ["bench", "--json-file", "nowhere/figures.json"],
            "--json-file: there is no folder nowhere; make it first",
        ),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_the_work(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(cli, arguments).exception
    assert isinstance(error, ConfigError)
    assert str(error) == message


def test_an_admin_key_for_a_flip_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    error = (
        CliRunner()
        .invoke(cli, ["flip", "worker-0", "--to", "decode", "--admin-key-file", str(tmp_path / "key")])
        .exception
    )
    assert isinstance(error, ConfigError)
    assert "--admin-key-file: cannot read" in str(error)


@pytest.mark.parametrize("command", ["up", "coordinator", "prefill", "decode", "worker"])
def test_help_is_two_screens(command: str) -> None:
    help_text = CliRunner().invoke(cli, [command, "--help"], terminal_width=110).output
    assert len(help_text.splitlines()) <= 60
    assert "--help-all" in help_text
    assert all(f"  {option} " in help_text for option in ("--model", "--log-level"))


def test_up_shows_every_option_of_the_coordinator_when_asked() -> None:
    help_text = CliRunner().invoke(cli, ["up", "--help-all"]).output
    names = [*SECTIONS["up"].model_fields, *SECTIONS["coordinator"].model_fields]
    assert {name for name in names if flag_of(name) not in help_text} <= FILE_ONLY


def test_few_options_are_all_shown() -> None:
    assert "--help-all" not in CliRunner().invoke(cli, ["doctor", "--help"]).output


def test_threads_of_torch_wait_without_spinning_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variable is read when torch is imported, here and in every process that the command starts."""
    monkeypatch.setattr(main, "cli", lambda **_: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    main.main()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    main.main()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
