"""`zoo-cli`: the table of commands, the output to which all commands print, and the table of exit codes.

A command parses its arguments, calls the library, and prints. A command's file is imported when the command is run or
its help is shown. The file imports torch and pandas only if the command needs weights, so that `zoo-cli --help` and
`zoo-cli list` start fast.

This is one file, because every command needs all three.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NamedTuple

import click

import checkpoints_zoo
from checkpoints_zoo import errors
from checkpoints_zoo.formats.text import align_columns, did_you_mean, finite_or_null, printable


class Command(NamedTuple):
    """A command: the file that defines it, its line in the help, and examples of its use.

    Args:
        defined_in: file that defines the command, with ":FUNCTION" if the file has several commands.
        summary: first line of the command's help.
        examples: example command lines for the help.
    """

    defined_in: str
    summary: str
    examples: tuple[str, ...]


COMMANDS = {
    "list": Command(
        "collections",
        "List the collections of the catalog, or of a folder.",
        (
            "zoo-cli list",
            "zoo-cli list --source out/",
        ),
    ),
    "show": Command(
        "show",
        "Show a collection's description, and its members.",
        ('zoo-cli show convnet-digits --where "test_accuracy > 0.97" --columns member,seed,test_accuracy',),
    ),
    "evaluate": Command(
        "measure:evaluate_command",
        "Measure an ensemble: accuracy, calibration, diversity, out-of-distribution detection.",
        ("zoo-cli evaluate convnet-digits -n 8 --ood photos --plot figures.png",),
    ),
    "predict": Command(
        "predict",
        "Run members on images and store their logits, in float16.",
        ("zoo-cli predict convnet-digits --data digits --out predicted/",),
    ),
    "plot": Command(
        "measure:plot_command",
        "Measure an ensemble and draw the figures into a PNG, PDF or SVG.",
        ("zoo-cli plot convnet-digits -n 8 --ood photos --out figures.png",),
    ),
    "pairwise": Command(
        "pairwise",
        "Compare every pair of members: mutual information ID and OOD, their correlation, disagreement.",
        ("zoo-cli pairwise convnet-digits --ood photos --out pairs.csv",),
    ),
    "compare-predictives": Command(
        "compare_predictives",
        "Compare the averaged predictions of two sets of members: agreement and total variation.",
        ("zoo-cli compare-predictives convnet-digits -n 16",),
    ),
    "mmd": Command(
        "mmd",
        "Compare the weights of two sets of members: MMD² by layer, before and after removing symmetries.",
        ("zoo-cli mmd convnet-digits --permutations 99",),
    ),
    "symmetries": Command(
        "symmetries:symmetries_command",
        "Show a network's symmetries, and the smallest mass that rescaling gives its members.",
        ("zoo-cli symmetries convnet-digits -n 8 --plot mass.png",),
    ),
    "align": Command(
        "align:align_command",
        "Align members by permuting their units, and show the permutations and distances.",
        ("zoo-cli align convnet-digits -n 8 --to 0 --plot align.png",),
    ),
    "compact": Command(
        "compact:compact_command",
        "Fit a Gaussian to the members before and after alignment; compare both with the ensemble.",
        ("zoo-cli compact convnet-digits --plot compact.png",),
    ),
    "compact-table": Command(
        "compact:compact_table_command",
        "Fit HMC and VI to a recipe, train an ensemble by it, and compare all with HMC, before and after alignment.",
        ("zoo-cli compact-table mlp-digits --runs 2 --draws 20 --latex table.tex",),
    ),
    "compare": Command(
        "compare",
        "Compare approximate posteriors with a population: MMD, NS, agreement, calibration, OOD detection, diversity.",
        ("zoo-cli compare convnet-digits --methods swag,laplace --plot compared.png",),
    ),
    "report": Command(
        "report",
        "Write one HTML page with every figure of a population.",
        ("zoo-cli report convnet-digits -n 8 --out report.html",),
    ),
    "download": Command(
        "download",
        "Fetch members to this machine, and no other bytes.",
        ("zoo-cli download convnet-digits --members 0-3 --dest four/",),
    ),
    "cache": Command(
        "cache",
        "List the members that were fetched from the Hub, or delete some.",
        ("zoo-cli cache --drop ORG/NAME --dry-run",),
    ),
    "verify": Command(
        "verify:verify_command",
        "Check members against their manifest: bytes, hashes, duplicates, accuracy.",
        (
            "zoo-cli verify convnet-digits",
            "zoo-cli verify out/ --retrain 3",
        ),
    ),
    "audit": Command(
        "audit:audit_command",
        "Check the files of any repo or folder for damage by hashes, sizes and first bytes.",
        ("zoo-cli audit hf://datasets/ORG/NAME",),
    ),
    "recipes": Command(
        "train:recipes_command",
        "List the recipes that come with the package, or those of a Python file, whose code runs.",
        (
            "zoo-cli recipes",
            "zoo-cli recipes my_recipe.py",
        ),
    ),
    "train": Command(
        "train:train_command",
        "Train members of a recipe and export them as a source: shards, manifest, description.",
        ("zoo-cli train convnet-digits --members 0-63 --out out/",),
    ),
    "train-merge": Command(
        "train:merge_command",
        "Merge members that were trained into several folders into one source.",
        ("zoo-cli train-merge out/ elsewhere/ --out all/",),
    ),
    "import": Command(
        "importing",
        "Make a collection of existing checkpoints.",
        ("zoo-cli import models.tgz --collection mine --architecture resnet18 --reshard out/",),
    ),
    "publish": Command(
        "publish",
        "Check a folder and upload it to the Hub.",
        ("zoo-cli publish out/ --repo ORG/NAME --dry-run",),
    ),
    "demo": Command(
        "demo",
        "Load, ensemble and measure 64 networks that come with the package.",
        ("zoo-cli demo",),
    ),
}

DONE, PROBLEMS, USAGE, MISSING, DAMAGED, NETWORK, BUG, INTERRUPTED, CLOSED = 0, 1, 2, 3, 4, 5, 70, 130, 141

MEANING_OF_CODE = {
    DONE: "done",
    PROBLEMS: "`verify` or `audit` found problems",
    USAGE: "a command, option or selection that is wrong or impossible",
    MISSING: "a collection, member, source or file that is not there, or may not be read",
    DAMAGED: "damaged data, or a format that this version can't read",
    NETWORK: "the network failed, or someone else has published to the repo meanwhile",
    BUG: "a bug of ours: please report it",
    INTERRUPTED: "interrupted",
    CLOSED: "the reader of the output is gone (`zoo-cli list | head -1`)",
}


@dataclass(frozen=True)
class Output:
    """Where a command writes its data (stdout) and its messages (stderr).

    Args:
        format: "table" for people, "json" for programs.
    """

    format: str

    def data(self, values: Any, *blocks: str) -> None:
        """Write a command's data to stdout: values as JSON, or blocks of text separated by empty lines.

        Args:
            values: JSON values, datetimes and paths; numbers that are not finite become null.
            blocks: blocks of text for people with the same data; empty blocks are left out.
        """
        if self.format == "json":
            text = json.dumps(finite_or_null(values), indent=1, allow_nan=False, default=_json_text)
        else:
            text = "\n\n".join(block for block in blocks if block)
        if text:
            click.echo(printable(text))

    def say(self, text: str) -> None:
        """Write a message to stderr."""
        click.echo(printable(text), err=True)


def format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --format, and pass it the Output as `out`."""

    @click.option(
        "--format", "format", type=click.Choice(["table", "json"]), default="table", metavar="table|json",
        help="How to print data: a table for people, or JSON.",
    )  # fmt: skip
    @wraps(command)
    def run_command(*args: Any, format: str, **options: Any) -> Any:
        return command(*args, out=Output(format), **options)

    return run_command


def _json_text(value: object) -> str:
    """Return the JSON string of a time or a path."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def table(rows: Sequence[Mapping[str, Any]], right_aligned: Sequence[str] = ()) -> str:
    """Return rows as a table of aligned columns, in plain text.

    Args:
        rows: rows of the table as mappings with the same keys, which become the header.
        right_aligned: keys of text columns that are aligned to the right, as number columns are.

    >>> print(table([{"name": "a", "members": 64}, {"name": "long", "members": 8}]))
    name  members
    a          64
    long        8
    """
    if not rows:
        return ""
    right_column_positions = {
        column_position
        for column_position, key in enumerate(rows[0])
        if key in right_aligned or all(isinstance(row[key], int | float | None) for row in rows)
    }
    return align_columns(
        [list(rows[0]), *([cell_text(row[key]) for key in rows[0]] for row in rows)], right_column_positions
    )


def fact_lines(facts: Mapping[str, Any]) -> str:
    """Return a mapping as text, with one key and its value per line.

    >>> print(fact_lines({"name": "convnet-digits", "members": 64}))
    name     convnet-digits
    members  64
    """
    key_width = max(map(len, facts))
    return "\n".join(f"{key.ljust(key_width)}  {cell_text(value)}".rstrip() for key, value in facts.items())


def cell_text(value: Any) -> str:
    """Return a value as text that is safe to print to a terminal.

    >>> cell_text(0.1234567), cell_text(None), cell_text(True)
    ('0.1235', '-', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    if isinstance(value, list | tuple):
        return ", ".join(cell_text(v) for v in value)
    return printable(str(value).replace("\n", " "))


def percent(share: float | None) -> str | None:
    """Return a share in [0, 1] as text in percent.

    >>> percent(0.98148)
    '98.15 %'
    """
    return None if share is None else f"{100 * share:.4g} %"


class ClosedOutput(Exception):
    """Raised if the reader of the output has closed it, in place of BrokenPipeError, which click would turn into exit
    code 1."""


# The first kind that matches an exception decides; an exception of no kind is a bug.
CODE_OF_ERROR: tuple[tuple[type[BaseException], int], ...] = (
    (click.exceptions.Abort, INTERRUPTED),
    (KeyboardInterrupt, INTERRUPTED),
    (ClosedOutput, CLOSED),
    (BrokenPipeError, CLOSED),
    (click.ClickException, USAGE),
    (errors.UsageError, USAGE),
    (errors.SelectionError, USAGE),
    (errors.TooLargeError, USAGE),
    (errors.WorkerError, USAGE),
    (errors.CollectionNotFound, MISSING),
    (errors.MemberNotFound, MISSING),
    (errors.SourceNotFound, MISSING),
    (errors.LockedError, MISSING),
    (errors.DamagedError, DAMAGED),
    (errors.FormatError, DAMAGED),
    (errors.LayoutError, DAMAGED),
    (ConnectionError, NETWORK),
    (TimeoutError, NETWORK),
    (OSError, MISSING),
)


def exit_code(error: BaseException) -> int:
    """Return the exit code for an exception."""
    return next((code for kind, code in CODE_OF_ERROR if isinstance(error, kind)), BUG)


def report_error(error: BaseException) -> int:
    """Write an exception to stderr; return its exit code."""
    error_code = exit_code(error)
    if error_code == BUG:
        traceback.print_exception(error)
        error_text = f"{type(error).__name__} in checkpoints-zoo {checkpoints_zoo.__version__}"
        say(f"error: a bug of ours ({error_text}): please report it, with the lines above")
    elif error_code == INTERRUPTED:
        say("interrupted")
    elif error_code != CLOSED:
        say(f"error: {_message_text(error)}")
    return error_code


@contextmanager
def closed_output() -> Iterator[None]:
    """Raise ClosedOutput for a BrokenPipeError inside the `with` block."""
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedOutput from error


def say(text: str) -> None:
    """Write one line to stderr."""
    line = text.replace("\n", " ")
    click.echo(f"zoo-cli: {printable(line)}", err=True)


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as one line of text, without the line of code that warned."""
    return f"zoo-cli: warning: {printable(str(message).replace(chr(10), ' '))}\n"


def _message_text(error: BaseException) -> str:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = error.format_message().rstrip(".")
        return f"{message}{'' if message.endswith('?') else '.'} See `{error.ctx.command_path} --help`."
    if isinstance(error, click.ClickException):
        return error.format_message()
    # A worker adds a note with its job to the exception: "in job members 0-3: ...".
    job_phrases = [note.split(":")[0] for note in getattr(error, "__notes__", []) if note.startswith("in job ")]
    return f"{error}{f' ({job_phrases[0]})' if job_phrases else ''}"


def discard_output() -> None:
    """Point stdout at the null device, so that Python's flush at exit does not fail on a closed pipe."""
    try:
        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_descriptor, sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        return


def silence_progress_bars() -> None:
    """Turn off the progress bars of other packages if stderr is not a terminal: each step would be a new line there."""
    if sys.stderr is None or not sys.stderr.isatty():
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
            os.environ.setdefault(name, "1")  # these packages read the variables when they are imported


class CommandGroup(click.Group):
    """A group of commands whose modules are imported on first use and that exit with the codes of `CODE_OF_ERROR`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module_name, _, function_name = COMMANDS[cmd_name].defined_in.partition(":")
        command: click.Command = getattr(
            import_module(f"checkpoints_zoo.cli.{module_name}"), function_name or "command"
        )
        # click keeps a command's options for help from its first use, which may be outside this group.
        command.context_settings = self.context_settings
        command.epilog = "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in COMMANDS[cmd_name].examples)])
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            similar_commands = did_you_mean(args[0], COMMANDS, text_of_name=repr)
            ctx.fail(f"No such command {args[0]!r}.{f' {similar_commands}' if similar_commands else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with closed_output():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with closed_output():
            return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command, and exit with its exit code."""
        code: Any = 0
        silence_progress_bars()
        previous_formatwarning, warnings.formatwarning = warnings.formatwarning, _warning_line
        if isinstance(sys.stdout, TextIOWrapper):
            # If a terminal can't show a character, such as "±", its code is printed instead, without an error.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            with errors.explain_missing_packages("this command"):
                code = super().main(args, "zoo-cli", complete_var, standalone_mode=False, **extra)
            if sys.stdout is not None:
                sys.stdout.flush()
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:  # noqa: BLE001 - every error becomes a line and an exit code
            code = report_error(error)
        finally:
            warnings.formatwarning = previous_formatwarning
        if code == CLOSED:
            discard_output()
        sys.exit(code)


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="checkpoints-zoo", prog_name="zoo-cli")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Populations of independently trained networks: find them, measure them as ensembles, check them.

    Data goes to stdout, messages to stderr. NAME is a collection's name, or a citation in quotes.

    `zoo-cli COMMAND --help` has examples. For completion in bash: eval "$(_ZOO_CLI_COMPLETE=bash_source zoo-cli)"; zsh
    and fish likewise.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
