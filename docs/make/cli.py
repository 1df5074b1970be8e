"""The reference of the command line, made from the commands themselves."""

from __future__ import annotations

import inspect

import click

from checkpoints_zoo.cli import main as program
from checkpoints_zoo.cli.main import COMMANDS, main

COMPLETION = {
    "bash, `~/.bashrc`": 'eval "$(_ZOO_CLI_COMPLETE=bash_source zoo-cli)"',
    "zsh, `~/.zshrc`": 'eval "$(_ZOO_CLI_COMPLETE=zsh_source zoo-cli)"',
    "fish, `~/.config/fish/completions/zoo-cli.fish`": "_ZOO_CLI_COMPLETE=fish_source zoo-cli | source",
}


def page() -> str:
    """Return the text of `docs/cli.md`."""
    context = click.Context(main, info_name="zoo-cli")
    lines = [
        "# zoo-cli",
        "",
        "Made from the commands by `python -m docs.make`; a test compares the page with them.",
        "",
        *_prose(main),
        *(f"- [`zoo-cli {name}`](#zoo-cli-{name}): {command.summary}" for name, command in COMMANDS.items()),
    ]
    for name in COMMANDS:
        command = main.get_command(context, name)
        if command is not None:
            lines += _command(f"zoo-cli {name}", command, COMMANDS[name].examples)
    lines += [
        "",
        "## Completion",
        "",
        "Completion of commands and options, in the file that the shell reads at its start:",
    ]
    lines += ["", "| shell | line |", "|---|---|"]
    lines += [f"| {shell} | `{line}` |" for shell, line in COMPLETION.items()]
    lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {_cell(meaning)} |" for code, meaning in program.MEANING_OF_CODE.items()]
    return "\n".join(lines) + "\n"


def _command(path: str, command: click.Command, examples: tuple[str, ...]) -> list[str]:
    arguments = [p.metavar or "" for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option)]
    usage = " ".join([path, *arguments, *(_usage(o) for o in options if o.required), "[OPTIONS]"])
    lines = [
        "",
        f"## {path}",
        "",
        f"`{usage}`",
        "",
        *_prose(command),
        "```bash",
        *examples,
        "```",
        "",
        "| option | default | meaning |",
        "|---|---|---|",
    ]
    for option in options:
        # Without a default it is None, or click's own mark for that.
        default = f"`{option.default}`" if isinstance(option.default, str | int) else ""
        names = ", ".join([*option.opts[:-1], _usage(option)])
        lines.append(f"| `{_cell(names)}` | {_cell(default)} | {_cell(option.help or '')} |")
    return lines


def _usage(option: click.Option) -> str:
    name = "/".join([option.opts[-1], *option.secondary_opts])
    return f"{name} {option.metavar}" if option.metavar else name


def _prose(command: click.Command) -> list[str]:
    return [*inspect.cleandoc(command.help or "").split("\n"), ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
