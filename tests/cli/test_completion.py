"""``splitserve completion`` installs what shells load, and they complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.terminal import terminal

from splitserve.cli.main import cli

COMMAND = Path(sys.executable).parent / "splitserve"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def installed(*arguments: str) -> str:
    answer = CliRunner().invoke(cli, ["completion", *arguments])
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_installing_twice_adds_one_line(home: Path) -> None:
    (home / ".bashrc").write_text("alias a=b")
    first = installed("--install", "bash")
    assert str(home / ".bashrc") in first
    installed("--install", "bash")
    lines = (home / ".bashrc").read_text().splitlines()
    assert lines[0] == "alias a=b"
    assert len(lines) == 2


def test_each_shell_has_its_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    installed("--install")
    assert "splitserve" in (home / ".config/fish/completions/splitserve.fish").read_text()
    installed("--install", "zsh")
    assert "compinit" in (home / ".zshrc").read_text()
    assert "compdef" in (home / ".local/share/splitserve/completion.zsh").read_text()


def test_an_unknown_shell_is_one_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    answer = CliRunner().invoke(cli, ["completion", "--install"])
    assert answer.exit_code == 1
    assert "splitserve completion --install bash" in answer.output


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
async def test_tab_completes_a_command_and_an_option_in_bash(home: Path) -> None:
    installed("--install", "bash")
    env = {"PATH": f"{COMMAND.parent}:{os.environ['PATH']}", "PS1": "$ ", "HOME": str(home)}
    async with terminal("bash", "--rcfile", str(home / ".bashrc"), "-i", env=env) as (screen, _):
        await screen.at_prompt("splitserve comp\t")
        await screen.until("splitserve completion")
        screen.type("--ins\t")
        await screen.until("--install")
        screen.type("ba\t")
        await screen.until("bash")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
async def test_tab_completes_a_command_and_an_option_in_zsh(home: Path) -> None:
    installed("--install", "zsh")
    env = {"PATH": f"{COMMAND.parent}:{os.environ['PATH']}", "PS1": "$ ", "HOME": str(home), "TERM": "xterm"}
    async with terminal("zsh", "-i", env=env) as (screen, _):
        await screen.at_prompt("splitserve comp\t")
        await screen.until("splitserve completion")
        screen.type("--ins\t")
        await screen.until("--install")
        screen.type("ba\t")
        await screen.until("bash")


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_offers_commands_and_options(home: Path) -> None:
    installed("--install", "fish")
    env = {"PATH": f"{COMMAND.parent}:{os.environ['PATH']}", "HOME": str(home)}
    for typed, offered in (
        ("comp", "completion"),
        ("completion --ins", "--install"),
        ("completion ba", "bash"),
    ):
        command = ["fish", "-c", f"complete -C 'splitserve {typed}'"]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert run.stdout.startswith(offered)
