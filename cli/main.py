"""The command ``splitserve``: one subcommand a role, and the tools around them.

Everything heavy is imported by the command that needs it, so that ``--help`` is fast and the coordinator
stays free of torch: a command names its function as MODULE:NAME.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from pathlib import Path
from typing import Any, Literal

import click

from ..coordinator.full_disk import is_full
from ..coordinator.tenants.errors import TenantsError
from ..deploy.errors import LaunchError
from ..engine.errors import EngineError
from ..planner.errors import PlannerError
from ..traces.errors import TraceError
from ..transport.errors import TransportError
from .completion import completion
from .config import CONFIG_VARIABLE, SECTIONS, CommandError, ConfigError, Sources, load
from .extras import advice_for
from .options import SettingsCommand, given, options

HELP_WIDTH = 110
ENTRY = "splitserve.cli.main:main"
EPILOG = (
    "Every option can also be given as an environment variable (--some-option: SPLITSERVE_SOME_OPTION) or "
    "in a YAML file (--config FILE). A flag beats a variable, a variable beats the file."
)


def config_option() -> click.Option:
    return click.Option(
        ["--config", "config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help=f"YAML file with settings; also {CONFIG_VARIABLE}.",
    )


def command(section: str, function: str, text: str, argument: click.Argument | None = None) -> click.Command:
    """Return a command whose options are the fields of a section's settings.

    ``function``: takes the settings, and the value of ``argument``; returns the exit status, or None for 0.
    A ``section`` such as ``trace_stats`` is the command ``stats`` of the group ``trace``.
    """

    def callback(config: Path | None, **given_options: Any) -> None:
        from .checks import require_writable

        arguments = [given_options.pop(str(argument.name))] if argument else []
        settings = load(section, given(given_options), Sources.read(config))
        require_writable(settings)
        sys.exit(pkgutil.resolve_name(f"splitserve.{function}")(settings, *arguments) or 0)

    def params() -> list[click.Parameter]:
        return [*filter(None, [argument]), *options(SECTIONS[section]), config_option()]

    return SettingsCommand(section.rpartition("_")[2], params, callback=callback, help=text, epilog=EPILOG)


def files() -> click.Argument:
    return click.Argument(
        ["files"], nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path)
    )


def up_command() -> click.Command:
    def params() -> list[click.Parameter]:
        return [*pkgutil.resolve_name("splitserve.cli.up:up_options")(), config_option()]

    def callback(config: Path | None, **flags: Any) -> None:
        from .launch import launch
        from .local_cluster import run
        from .up import plan

        made = plan(given(flags), Sources.read(config))
        sys.exit(run(made, ENTRY) if made.up.on == "here" else launch(made))

    text = (
        "Start a coordinator, prefill and decode workers on this machine; restart what crashes; stop all on "
        "Ctrl-C. An option of the workers holds for all of them; with --prefill- or --decode- before its "
        "name for one role only (--decode-device cuda:1). Workers are dealt out over the GPUs there are."
    )
    return SettingsCommand("up", params, callback=callback, help=text, epilog=EPILOG)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--rotate",
    "step",
    type=click.Choice(["add", "switch", "finish"]),
    help="Change the key in FILE, step by step.",
)
def keygen(file: Path, step: Literal["add", "switch", "finish"] | None) -> None:
    """Make a new cluster key and write it to FILE, readable by you alone.

    Copy the file to every host of the cluster: anyone with it can send work to the workers.
    """
    from ..transport.channels.keys import generate_key, rotate

    if step is not None:
        rotate(file, step)
        click.echo(
            f"{file} changed ({step}); copy it to every host, then restart the workers one after the other"
        )
        return
    if file.exists():
        raise click.ClickException(
            f"{file} exists already: a new key would lock out the processes that use it. Remove it first or "
            "name another file."
        )
    generate_key(file)
    click.echo(f"wrote {file}; give it to every process with --key-file {file}")


@click.command()
def version() -> None:
    """Print the versions of splitserve, of its wire, of Python and of the main libraries, and the commit it
    was built from."""
    from .version import version_text

    click.echo(version_text())


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        ctx.invoke(version)
        ctx.exit()


class Commands(click.Group):
    """A misspelt command is answered with the near ones, and with all there are."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            vllm = "A model is served by `splitserve up --model MODEL`. " if args[0] == "serve" else ""
            commands = f"{vllm}Commands are: {', '.join(self.commands)}."
            raise click.UsageError(f"{error.format_message()} {commands}", ctx) from None


@click.group(
    cls=Commands, context_settings={"max_content_width": HELP_WIDTH, "help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Same as `splitserve version`.",
)
def cli() -> None:
    """Serves large language models with prefill and decode on separate worker pools.

    `splitserve up` starts everything on this machine; `splitserve chat` talks to it.
    """


KEYS = (
    "API keys, tenants and tiers, in the file that the coordinator's --tenants-file names.\n\n"
    "Running coordinators go by every change within a second; none has to be restarted."
)
TRACE = (
    "Look at traces of requests, change them, and make synthetic ones.\n\nReads the Azure LLM inference "
    "traces, Mooncake's, splitwise-sim's, ServeGen's and splitserve's own format, told apart by their "
    "first line; any of them may be gzip'ed."
)

for added in (
    up_command(),
    command(
        "coordinator",
        "cli.coordinator:main",
        "Run the coordinator: the HTTP server that sends requests to the workers.",
    ),
    command("prefill", "cli.start:worker", "Run one prefill worker."),
    command("decode", "cli.start:worker", "Run one decode worker."),
    command(
        "worker",
        "cli.start:worker",
        "Run one worker that can change its role, prefill or decode, while it runs.",
    ),
    command(
        "flip",
        "cli.flip:flip",
        "Have WORKER, started as `splitserve worker` or by `splitserve up --flexible`, change its role "
        "in place.",
        click.Argument(["worker"], metavar="WORKER"),
    ),
    command(
        "top",
        "cli.terminal.top:main",
        "Live workers, latencies and requests of a running server in this terminal; q quits.",
    ),
    command("chat", "cli.terminal.chat:main", "Chat with a running server in this terminal."),
    keygen,
    command(
        "doctor",
        "cli.doctor.doctor:main",
        "Check whether this machine can serve, and print what to do where it cannot.",
    ),
    command(
        "bench",
        "cli.start:bench",
        "Send load to an OpenAI-compatible server and measure latency, throughput and goodput.",
    ),
    Commands(
        "keys",
        help=KEYS,
        commands=[
            command("keys_create", "cli.keys:create", "Make a key; print it this once."),
            command("keys_list", "cli.keys:show", "List tiers, tenants and keys."),
            command("keys_rotate", "cli.keys:rotate", "Make a key in another one's place."),
            command("keys_revoke", "cli.keys:revoke", "End a key."),
            command("keys_tenant", "cli.keys:tenant", "Make or change a tenant."),
            command("keys_tier", "cli.keys:tier", "Make or change a tier: priority and limits."),
        ],
    ),
    command("usage", "cli.usage:show", "Show what requests have used, by tenant, key, model or day."),
    Commands(
        "trace",
        help=TRACE,
        commands=[
            command(
                "trace_stats",
                "traces.commands:stats",
                "Describe traces: arrivals, bursts, lengths, prefix reuse.",
                files(),
            ),
            command(
                "trace_convert",
                "traces.commands:convert",
                "Write traces in splitserve's own format: cut, thinned, mixed, scaled.",
                files(),
            ),
            command(
                "trace_make",
                "traces.commands:make",
                "Draw a synthetic trace: Poisson, bursty, diurnal, conversations.",
            ),
            command("trace_fit", "traces.commands:fit", "Fit a synthetic workload to a trace FILE.", files()),
        ],
    ),
    command(
        "simulate",
        "planner.simulate_command:simulate",
        "Run a trace through a cluster of any size under virtual time.",
    ),
    command(
        "plan", "planner.several:plan_each", "Find the best ratio of prefill and decode workers for a load."
    ),
    command(
        "profile",
        "cli.start:profile",
        "Measure how long a worker's steps take, for the simulator, the planner and paced runners.",
    ),
    completion,
    version,
):
    cli.add_command(added)


def main() -> None:
    """Entry point of the command ``splitserve``."""
    # torch's threads spin otherwise, on others' cores too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        cli(prog_name="splitserve", standalone_mode=True)
    except (CommandError, ConfigError) as error:
        click.echo(f"splitserve: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except (EngineError, LaunchError, PlannerError, TenantsError, TraceError, TransportError) as error:
        click.echo(f"splitserve: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        if not is_full(error):
            raise
        click.echo(f"splitserve: a file or standard output cannot be written: {error.strerror}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if not (advice := advice_for(error)):
            raise
        click.echo(f"splitserve: {advice}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
