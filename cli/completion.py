"""``splitserve completion``: commands and options by Tab, in bash, zsh and fish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

import click
from click.shell_completion import get_completion_class

Shell = Literal["bash", "zsh", "fish"]
VARIABLE = "_SPLITSERVE_COMPLETE"
MARK = "# completion of splitserve"
LOADS = {
    "bash": 'source "{}"',
    "zsh": '(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}; source "{}"',
}
"""The line of a shell's start file, by shell; fish needs none."""


@click.command()
@click.argument("shell", required=False, type=click.Choice(get_args(Shell)))
@click.option("--install", is_flag=True, help="Write it where the shell finds it, for all new shells.")
@click.pass_context
def completion(ctx: click.Context, shell: Shell | None, install: bool) -> None:
    """Print the completion of commands and options for SHELL, or install it.

    SHELL is the one that $SHELL names, unless given. --install writes a file, and for bash and zsh one line
    into ~/.bashrc or ~/.zshrc; running it again changes nothing else.
    """
    named = shell or Path(os.environ.get("SHELL", "")).name
    if named not in get_args(Shell):
        raise click.ClickException("name the shell: splitserve completion --install bash (or zsh, fish)")
    maker = get_completion_class(named)
    assert maker is not None
    script = maker(ctx.find_root().command, {}, "splitserve", VARIABLE).source()
    if not install:
        click.echo(script)
        return
    try:
        paths = _install(named, script)
    except OSError as error:
        raise click.ClickException(
            f"{error.filename or 'a file'} cannot be written: {error.strerror}"
        ) from error
    click.echo(f"wrote {' and '.join(map(str, paths))}; open a new shell")


def _install(shell: str, script: str) -> list[Path]:
    """Write the script, and a line that loads it. Return the files that were changed. Raises OSError."""
    if shell == "fish":
        file = _folder("XDG_CONFIG_HOME", ".config") / "fish/completions/splitserve.fish"
    else:
        file = _folder("XDG_DATA_HOME", ".local/share") / f"splitserve/completion.{shell}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script, encoding="utf-8")
    if shell == "fish":
        return [file]
    start = (
        Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
        if shell == "zsh"
        else Path.home() / ".bashrc"
    )
    before = start.read_text(encoding="utf-8") if start.exists() else ""
    line = f"{LOADS[shell].format(file)}  {MARK}\n"
    if line in before:
        return [file]
    with start.open("a", encoding="utf-8") as opened:
        opened.write(line if before.endswith("\n") or not before else f"\n{line}")
    return [file, start]


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)
