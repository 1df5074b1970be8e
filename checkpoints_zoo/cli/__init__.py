"""`zoo-cli`: each command parses, calls the library, prints.

A command's file is imported when the command is run or asked for its own help, and imports torch and pandas
only where it needs weights, so that `zoo-cli --help` and `zoo-cli list` start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from checkpoints_zoo.cli import failures

# Name -> its file, with the function where the file has more than one command, and its line in the help. No file may
# have the name of a builtin: once imported it is a name in here.
COMMANDS = {
    "list": ("collections", "List the collections of the catalog, or of a folder."),
    "show": ("show", "Show what a collection is, and its members."),
    "evaluate": (
        "measure:evaluate_command",
        "Measure an ensemble: accuracy, calibration, diversity, out-of-distribution detection.",
    ),
    "predict": ("predict", "Run members on images and store their logits, in float16."),
    "plot": ("measure:plot_command", "Measure an ensemble and draw the figures into a PNG."),
    "pairwise": (
        "pairwise",
        "Compare every pair of members: mutual information ID and OOD, their correlation, disagreement.",
    ),
    "mmd": ("mmd", "Compare the weights of two sets of members: MMD² by layer, before and after removing symmetries."),
    "symmetries": (
        "symmetries:symmetries_command",
        "Show a network's symmetries, and the smallest mass that rescaling gives its members.",
    ),
    "align": ("symmetries:align_command", "Align members by permuting their units, and say what that does."),
    "compact": (
        "compact:compact_command",
        "Fit a Gaussian to the members before and after alignment; compare both with the ensemble.",
    ),
    "compact-table": (
        "compact:compact_table_command",
        "Fit HMC and VI to a recipe, train an ensemble by it, and compare all with HMC, before and after alignment.",
    ),
    "compare": (
        "compare",
        "Compare approximate posteriors with a population: MMD, NS, accuracy, calibration, OOD detection, diversity.",
    ),
    "report": ("report", "Write one HTML page with every figure of a population."),
    "download": ("download", "Bring members' bytes to this machine, and no others."),
    "cache": ("cache", "List the members that were fetched from the Hub, or delete some."),
    "verify": ("verify:verify_command", "Check members against their manifest: bytes, hashes, duplicates, accuracy."),
    "audit": (
        "verify:audit_command",
        "Look for what is wrong with any repo or folder, from hashes, sizes and first bytes.",
    ),
    "import": ("importing", "Make a collection of checkpoints that lie anywhere."),
    "publish": ("publish", "Check a folder and put it on the Hub."),
    "demo": ("demo", "Load, ensemble and measure 64 networks that come with the package."),
}


class Group(click.Group):
    """Commands that are imported on first use, and one table of exit codes for all of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        file, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"checkpoints_zoo.cli.{file}"), name or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, n=1, cutoff=0.5)
            ctx.fail(f"No such command {args[0]!r}.{f' Did you mean {near[0]!r}?' if near else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with failures.closed_output():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with failures.closed_output():
            return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with the code that its end deserves."""
        code: Any = 0
        if isinstance(sys.stdout, TextIOWrapper):
            # A terminal without "±" shows its code in place of an error.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, "zoo-cli", complete_var, standalone_mode=False, **extra)
            if sys.stdout is not None:
                sys.stdout.flush()
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:  # noqa: BLE001 - whatever it is, it becomes a line and an exit code
            code = failures.explain(error)
        if code == failures.CLOSED:
            failures.discard_output()
        sys.exit(code)


@click.group(cls=Group, invoke_without_command=True, no_args_is_help=False)
@click.version_option(package_name="checkpoints-zoo", prog_name="zoo-cli")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Populations of independently trained networks: find them, measure them as ensembles, check them.

    Data goes to stdout, talk to stderr. A NAME is that of a collection, or a citation in quotes.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
