"""`vlaunch completion`: shell code that completes commands and flags."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print shell completion; add `eval "$(vlaunch completion bash)"` to ~/.bashrc."""
    from launcher.cli.main import cli

    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(completion_class(cli, {}, "vlaunch", "_VLAUNCH_COMPLETE").source())
