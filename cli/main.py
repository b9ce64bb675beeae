"""The command ``splitserve``: one subcommand a role, and the tools around them.

Everything heavy is imported by the command that needs it, so that ``--help`` is fast and the coordinator
stays free of torch.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import click

from ..coordinator.tenants.errors import TenantsError
from ..deploy.process_log import log_to_stderr
from ..engine.errors import EngineError
from ..planner.errors import PlannerError
from ..transport.errors import TransportError
from .config import CONFIG_VARIABLE, SECTIONS, ConfigError, Sources, load
from .extras import advice_for
from .options import SettingsCommand, given, options
from .settings import ChatSettings, DoctorSettings, FlipSettings, TopSettings

HELP_WIDTH = 110
ENTRY = "splitserve.cli.main:main"
EPILOG = (
    "Every option can also be given as an environment variable (--some-option: SPLITSERVE_SOME_OPTION) or "
    "in a YAML file (--config FILE). A flag beats a variable, a variable beats the file."
)
Run = Callable[[Any], int | None]
_log = logging.getLogger(__name__)


def config_option() -> click.Option:
    return click.Option(
        ["--config", "config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help=f"YAML file with settings; also {CONFIG_VARIABLE}.",
    )


def settings_command(section: str, text: str, run: Run) -> click.Command:
    """A command whose options are the fields of a section's settings; ``run`` takes the settings and returns
    the exit status."""

    def callback(config: Path | None, **flags: Any) -> None:
        sys.exit(run(_checked(section, flags, config)) or 0)

    params = [*options(SECTIONS[section]), config_option()]
    return SettingsCommand(
        _name(section), params=params, callback=callback, help=text, epilog=EPILOG, no_args_is_help=False
    )


def files_command(section: str, text: str, run: Callable[[Any, Sequence[Path]], int]) -> click.Command:
    """Like settings_command, with one or more FILEs."""

    def callback(config: Path | None, files: Sequence[Path], **flags: Any) -> None:
        sys.exit(run(_checked(section, flags, config), files))

    argument = click.Argument(
        ["files"], nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path)
    )
    params = [argument, *options(SECTIONS[section]), config_option()]
    return SettingsCommand(_name(section), params=params, callback=callback, help=text, epilog=EPILOG)


def _checked(section: str, flags: Mapping[str, Any], config: Path | None) -> Any:
    """The settings of a command, whose files can be written. Raises ConfigError."""
    from .checks import require_writable

    settings = load(section, given(flags), Sources.read(config))
    require_writable(settings)
    return settings


def _name(section: str) -> str:
    """``stats`` of ``trace_stats``, which stands in the group ``trace``."""
    return section.rpartition("_")[2]


def run_coordinator(settings: Any) -> None:
    from .coordinator import main as coordinator

    coordinator(settings)


def _end_with_any_thread() -> None:
    """Let an exception that ends a thread end this process, which would go on half alive without the
    thread."""

    def end(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        _log.critical("background work has failed (%s), this process ends", name, exc_info=args.exc_value)
        os._exit(1)  # as if killed, which loses no stream

    threading.excepthook = end


def _ready_worker(settings: Any) -> Any:
    """A worker's settings, its model in a folder that can be served; its log begins."""
    from .checks import require_model
    from .model_source import with_folder

    log_to_stderr(settings.log_level, settings.log_format, settings.worker_id)
    _end_with_any_thread()
    settings = with_folder(settings, weights=settings.runner == "model")
    require_model(settings.model, weights=settings.runner == "model")
    return settings


def run_worker(settings: Any) -> None:
    settings = _ready_worker(settings)
    from ..worker.main import run

    run(settings)


def flip_command() -> click.Command:
    def callback(config: Path | None, worker: str, **flags: Any) -> None:
        from .flip import flip

        sys.exit(flip(worker, cast(FlipSettings, load("flip", given(flags), Sources.read(config)))))

    text = (
        "Have WORKER, started as `splitserve worker` or by `splitserve up --flexible`, change its role "
        "in place."
    )
    params = [click.Argument(["worker"], metavar="WORKER"), *options(FlipSettings), config_option()]
    return SettingsCommand("flip", params=params, callback=callback, help=text, epilog=EPILOG)


def run_top(settings: TopSettings) -> int:
    from .top import main as top

    return top(settings)


def run_chat(settings: ChatSettings) -> int:
    from .chat import main as chat

    return chat(settings)


def run_doctor(settings: DoctorSettings) -> int:
    from .doctor import main as doctor

    return doctor(settings)


def run_bench(settings: Any) -> int:
    from ..loadgen.load import main as bench
    from .checks import read_key
    from .tls_trust import trust

    key = read_key("--api-key-file", settings.api_key_file)
    return bench(settings, key, trust(settings.url, settings.tls_ca) or None)


def run_profile(settings: Any) -> int:
    from ..planner.profile_commands import profile
    from .checks import require_model
    from .model_source import with_folder

    settings = with_folder(settings, weights=settings.runner == "model")
    if settings.model is not None:
        require_model(settings.model, weights=settings.runner == "model")
    return profile(settings)


def run_simulate(settings: Any) -> int:
    from ..planner.simulate_command import simulate

    return simulate(settings)


def run_plan(settings: Any) -> int:
    from ..planner.plan_command import plan

    return plan(settings)


def run_trace_stats(settings: Any, files: Sequence[Path]) -> int:
    from ..planner.trace_commands import stats

    return stats(settings, files)


def run_trace_convert(settings: Any, files: Sequence[Path]) -> int:
    from ..planner.trace_commands import convert

    return convert(settings, files)


def run_trace_make(settings: Any) -> int:
    from ..planner.trace_commands import make

    return make(settings)


def run_trace_fit(settings: Any, files: Sequence[Path]) -> int:
    from ..planner.trace_commands import fit

    return fit(settings, files)


def trace_group() -> click.Group:
    """``splitserve trace ...``"""
    text = (
        "Look at traces of requests, change them, and make synthetic ones.\n\nReads the Azure LLM inference "
        "traces, Mooncake's, splitwise-sim's, ServeGen's and splitserve's own format, told apart by their "
        "first line; any of them may be gzip'ed."
    )
    group = Commands("trace", help=text)
    group.add_command(
        files_command(
            "trace_stats",
            "Tell what traces are like: arrivals, bursts, lengths, prefix reuse.",
            run_trace_stats,
        )
    )
    group.add_command(
        files_command(
            "trace_convert",
            "Write traces in splitserve's own format: cut, thinned, mixed, scaled.",
            run_trace_convert,
        )
    )
    group.add_command(
        settings_command(
            "trace_make", "Draw a synthetic trace: Poisson, bursty, diurnal, conversations.", run_trace_make
        )
    )
    group.add_command(files_command("trace_fit", "Fit a synthetic workload to a trace FILE.", run_trace_fit))
    return group


def keys_group() -> click.Group:
    """``splitserve keys ...``"""
    text = (
        "API keys, tenants and tiers, in the file that the coordinator's --tenants-file names.\n\n"
        "Running coordinators go by every change within a second; none has to be restarted."
    )
    group = Commands("keys", help=text)
    for name, what in (
        ("create", "Make a key; print it this once."),
        ("list", "List tiers, tenants and keys."),
        ("rotate", "Make a key in another one's place."),
        ("revoke", "End a key."),
        ("tenant", "Make or change a tenant."),
        ("tier", "Make or change a tier: priority and limits."),
    ):
        group.add_command(settings_command(f"keys_{name}", what, partial(run_keys, name)))
    return group


def run_keys(name: str, settings: Any) -> None:
    from . import keys

    commands: dict[str, Run] = {
        "create": keys.create,
        "list": keys.show,
        "rotate": keys.rotate,
        "revoke": keys.revoke,
        "tenant": keys.tenant,
        "tier": keys.tier,
    }
    commands[name](settings)


def run_usage(settings: Any) -> int:
    from .usage import show

    return show(settings)


def run_up(config: Path | None, **flags: Any) -> None:
    from .local_cluster import run
    from .up import plan

    sys.exit(run(plan(given(flags), Sources.read(config)), ENTRY))


def up_command() -> click.Command:
    from .up import up_options

    text = (
        "Start a coordinator, prefill and decode workers on this machine; restart what crashes; stop all on "
        "Ctrl-C. An option of the workers holds for all of them; with --prefill- or --decode- before its "
        "name for one role only (--decode-device cuda:1). Workers are dealt out over the GPUs there are."
    )
    return SettingsCommand(
        "up", params=[*up_options(), config_option()], callback=run_up, help=text, epilog=EPILOG
    )


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

    Copy the file to every host of the cluster: who has it can send work to the workers.
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
            f"{file} exists already: a new key would lock out whoever uses it. Remove it first or "
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
            said = f"{error.format_message().rstrip('.')}. Commands are: {', '.join(self.commands)}."
            raise click.UsageError(said, ctx) from None


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


for command in (
    up_command(),
    settings_command(
        "coordinator",
        "Run the coordinator: the HTTP server that sends requests to the workers.",
        run_coordinator,
    ),
    settings_command("prefill", "Run one prefill worker.", run_worker),
    settings_command("decode", "Run one decode worker.", run_worker),
    settings_command(
        "worker", "Run one worker that can change its role, prefill or decode, while it runs.", run_worker
    ),
    flip_command(),
    settings_command(
        "top",
        "Live workers, latencies and requests of a running server in this terminal; q quits.",
        cast(Run, run_top),
    ),
    settings_command("chat", "Chat with a running server in this terminal.", cast(Run, run_chat)),
    keygen,
    settings_command(
        "doctor",
        "Check whether this machine can serve, and say what to do where it cannot.",
        cast(Run, run_doctor),
    ),
    settings_command(
        "bench",
        "Send load to an OpenAI-compatible server and measure latency, throughput and goodput.",
        run_bench,
    ),
    keys_group(),
    settings_command("usage", "Show what requests have used, by tenant, key, model or day.", run_usage),
    trace_group(),
    settings_command(
        "simulate", "Run a trace through a cluster of any size under virtual time.", run_simulate
    ),
    settings_command("plan", "Find the best ratio of prefill and decode workers for a load.", run_plan),
    settings_command(
        "profile",
        "Measure how long a worker's steps take, for the simulator, the planner and paced runners.",
        run_profile,
    ),
    version,
):
    cli.add_command(command)


def main() -> None:
    """Entry point of the command ``splitserve``."""
    try:
        cli(prog_name="splitserve", standalone_mode=True)
    except ConfigError as error:
        click.echo(f"splitserve: {error}", err=True)
        sys.exit(2)
    except (EngineError, PlannerError, TenantsError, TransportError) as error:
        click.echo(f"splitserve: {error}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if not (advice := advice_for(error)):
            raise
        click.echo(f"splitserve: {advice}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
