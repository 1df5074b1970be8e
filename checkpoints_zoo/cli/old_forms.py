"""The training commands of version 0.1: they run `zoo-cli`, and name the new form in a note on stderr, until 0.3."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from checkpoints_zoo.cli.main import COMMANDS, main, say


def run_old_form(program: str, name_is_valid: bool = False) -> None:
    """Run the command line of this process as a command of `zoo-cli`, in its old or new form; exit with the command's
    code.

    Args:
        program: text that the user typed before the arguments, such as "python -m training".
        name_is_valid: whether the program's name is still valid; a note is then written only if the arguments have the
            old form.
    """
    arguments = sys.argv[1:]
    new_arguments = translate(arguments)
    if not name_is_valid or new_arguments != arguments:
        old_form = " ".join([program, *arguments[:1]])
        say(f"`{old_form}` is `{' '.join(['zoo-cli', *new_arguments[:1]])}` now; the old form goes in 0.3")
    main(new_arguments)


def translate(arguments: Sequence[str]) -> list[str]:
    """Translate arguments of `python -m training` of version 0.1; return the arguments of `zoo-cli`.

    >>> translate(["convnet-digits", "--members", "0-3", "--out", "out/"])
    ['train', 'convnet-digits', '--members', '0-3', '--out', 'out/']
    >>> translate(["my_recipe.py", "--list"])
    ['recipes', 'my_recipe.py']
    >>> translate(["show", "convnet-digits"])
    ['show', 'convnet-digits']
    """
    words = list(arguments)
    first_word = words[0] if words else "--help"
    if first_word == "merge":
        return ["train-merge", *words[1:]]
    if first_word == "verify":
        has_retrain = any(word.split("=")[0] == "--retrain" for word in words)
        return words if has_retrain else [*words, "--retrain"]
    if first_word in COMMANDS or first_word in ("-h", "--help", "--version"):
        return words
    if "--list" in words:
        return ["recipes", *(word for word in words if word != "--list")]
    return ["train", *words]
