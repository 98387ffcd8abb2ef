"""The command `vlaunch`: its subcommands, each imported when it is called, and the output of
errors.
"""

import contextlib
import importlib
import os
import re
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import click

from launcher import __version__
from launcher.core.errors import RequestError, VlaunchError
from launcher.core.redaction import redact_output

# Sections of `--help`: commands with their functions, imported when they are called, and lines of
# help.
_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "First cluster, in this order": {
        "init": ("launcher.hosts.init_command:init", "Scan hosts and write inventory.yaml"),
        "check": ("launcher.hosts.check_command:check", "Check nodes and network; change nothing"),
        "up": ("launcher.cluster.up_command:up", "Start the cluster, or apply inventory changes"),
        "check-nccl": (
            "launcher.network.check_nccl_command:check_nccl",
            "Measure the network between all nodes",
        ),
        "serve": (
            "launcher.serving.serve_command:serve",
            "Serve a model and wait for its first answer",
        ),
        "front": (
            "launcher.front.front_command:front",
            "Show the address for all servers; manage its keys",
        ),
    },
    "Operate": {
        "status": ("launcher.serving.status_command:status", "Show nodes, servers, jobs and drift"),
        "chat": ("launcher.serving.chat_command:chat", "Chat with the served model"),
        "metrics": (
            "launcher.serving.metrics_command:metrics",
            "Show throughput, latency and KV cache use",
        ),
        "soak": (
            "launcher.serving.soak_command:soak",
            "Load a running server and report its errors",
        ),
        "logs": ("launcher.diagnose.logs_command:logs", "Print or follow logs from all nodes"),
        "exec": ("launcher.serving.exec_command:exec", "Run a command on every node"),
        "tunnel": ("launcher.serving.tunnel_command:tunnel", "Forward the API to this machine"),
        "rollback": (
            "launcher.serving.rollback_command:rollback",
            "Return to the last server that worked",
        ),
        "stop": (
            "launcher.serving.stop_command:stop",
            "Stop servers or batch jobs; keep the cluster",
        ),
        "down": ("launcher.cluster.down_command:down", "Remove the cluster from every node"),
    },
    "Batch": {
        "batch": ("launcher.batch.batch_command:batch", "Run a model over every row of a dataset"),
        "jobs": ("launcher.batch.jobs_command:jobs", "List and remove batch jobs"),
    },
    "Troubleshoot": {
        "doctor": (
            "launcher.diagnose.doctor_command:doctor",
            "Find the likely cause of a failure in the logs",
        ),
        "collect": (
            "launcher.diagnose.collect_command:collect",
            "Write a redacted bundle for a bug report",
        ),
        "audit": ("launcher.app.audit_command:audit", "Show who changed what, and when"),
        "lock": ("launcher.app.lock_command:lock", "Show or break the cluster lock"),
    },
    "Plan and prepare": {
        "plan": (
            "launcher.planner.plan_command:plan",
            "Choose TP x PP for a model; estimate its KV cache",
        ),
        "recipes": ("launcher.recipes.recipes_command:recipes", "List and show vLLM recipes"),
        "model": (
            "launcher.distribute.model_command:model",
            "List, download, copy and remove models",
        ),
        "image": ("launcher.distribute.image_command:image", "List, pull and copy images"),
        "secrets": ("launcher.cluster.secrets_command:secrets", "List and rotate secrets"),
        "export": (
            "launcher.export.export_command:export",
            "Generate Kubernetes, Prometheus and firewall files",
        ),
    },
    "Tools": {
        "lab": (
            "launcher.lab.lab_command:lab",
            "Run a test cluster on this machine; no GPU needed",
        ),
        "config": (
            "launcher.app.config_command:config",
            "Validate the inventory and print it in full",
        ),
        "schema": (
            "launcher.cli.schema_command:schema",
            "Print the JSON Schema of inventories or jobs",
        ),
        "completion": ("launcher.cli.completion_command:completion", "Print shell completion"),
    },
    "": {  # not listed
        "payload": ("launcher.cli.payload_command:payload", ""),
    },
}
# name → (module, function, line of help)
COMMANDS = {
    name: (*target.split(":"), text)
    for commands in _SECTIONS.values()
    for name, (target, text) in commands.items()
}

# click's names of types, longest first
_CLICK_NUMBERS = {
    **{"integer range": "whole number", "integer": "whole number"},
    **{"float range": "number", "float": "number"},
}
_LOCAL = (
    "this is about the machine you are on: vlaunch writes below XDG_CACHE_HOME and XDG_STATE_HOME, "
    "which can be set to folders with room"
)


class LazyGroup(click.Group):
    """A group whose commands are imported on demand: `--help` reads only their tables."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names that `--help` shows."""
        return [name for name, (_, _, help_) in COMMANDS.items() if help_]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest a similar one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from launcher.core.similar import did_you_mean

            suggestion = did_you_mean(args[0], self.list_commands(ctx))
            raise click.UsageError(f"no command `{args[0]}`{suggestion}", ctx)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section, without importing them, then options."""
        for title, commands in _SECTIONS.items():
            if title:
                with formatter.section(title):
                    formatter.write_dl(
                        [(f"{name:<10}", text) for name, (_, text) in commands.items()]
                    )
        click.Command.format_options(self, ctx, formatter)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Inventory: -i, $VLAUNCH_INVENTORY, ./inventory.yaml, or the one last used by"
    " `vlaunch up`. DURATION: 90s, 30m, 1h30m, or plain seconds.",
)
@click.version_option(__version__, prog_name="vlaunch")
def cli() -> None:
    """Turn GPU servers that you can reach over SSH into a verified vLLM cluster."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program and exit.

    Exit codes: 0 done, 1 failed, 2 wrong request, 3 warnings or error rows (`--strict`), 130
    interrupted, 141 output closed; `exec` returns its command's own.
    """
    sys.excepthook = print_traceback
    threading.excepthook = lambda args: print_traceback(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )
    exit_process(run_command(argv))


def exit_process(exit_code: int) -> NoReturn:
    """Flush all output and exit.

    The interpreter's own shutdown is skipped: with busy processors it has spent half a minute on a
    last garbage collection.
    """
    try:
        click.echo("", nl=False)  # flushes
    except BrokenPipeError:
        exit_code = 141
    except OSError as error:
        exit_code = _show_error(VlaunchError(f"standard output: {error}", hint=_LOCAL), None)
    with contextlib.suppress(OSError):
        click.echo("", nl=False, err=True)
    os._exit(exit_code)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Errors are shown, tracebacks only with
    `--verbose`, secrets never.
    """
    with redact_output():
        return _run_command(argv)


def _run_command(argv: Sequence[str] | None) -> int:
    try:
        result = cli.main(argv, prog_name="vlaunch", standalone_mode=False, obj=_read_argv(argv))
    except VlaunchError as error:
        return _show_error(error, argv)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        _show_usage_error(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        # The reader of the output is gone; avoid the interpreter's complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        # Problems of this machine: a full disk, a home directory without write access.
        return _show_error(VlaunchError(str(error) or type(error).__name__, hint=_LOCAL), argv)
    return result if isinstance(result, int) else 0


def _show_usage_error(error: click.ClickException) -> None:
    """Show click's usage error as one of ours; a group without a command shows its help."""
    from launcher.app import terminal

    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    text, *rest = map(str.strip, error.format_message().splitlines() or [""])
    for numbers, name in _CLICK_NUMBERS.items():
        text = text.replace(f"is not a valid {numbers}", f"is not a {name}")
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path} --help`" if context is not None else ""
    if re.search(r"unexpected extra argument.*\.ya?ml\b", text):
        hint = "pass the inventory with `-i`"
    terminal.show_error(
        RequestError(f"{text[:1].lower()}{text[1:].removesuffix('.')}", evidence=rest, hint=hint)
    )


def _show_error(error: VlaunchError, argv: Sequence[str] | None) -> int:
    """Show an error, with its traceback if `--verbose` is set; return the exit code."""
    from launcher.app import terminal

    arguments = _read_argv(argv)
    if "--verbose" in arguments[: arguments.index("--") if "--" in arguments else None]:
        print_traceback(type(error), error, error.__traceback__)
    terminal.show_error(error)
    return error.exit_code


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback.

    Its texts include output of nodes, which must not send control sequences to the terminal.
    """
    import traceback

    from launcher.core import untrusted

    for line in "".join(traceback.format_exception(kind, error, trace)).splitlines():
        click.echo(untrusted.sanitize(line), err=True)


def _read_argv(argv: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if argv is None else argv)
