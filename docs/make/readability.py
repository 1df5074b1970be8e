"""Draw random sentences and names of the package: `python -m docs.make.readability` prints them.

Somebody who has not seen the package reads them and says what each means without looking elsewhere.
Misread ones are rewritten.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import textwrap
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
SHORTEST_SENTENCE = 4  # words
# A paragraph of a docstring ends at an empty line, at a heading, and before each described argument or error.
PARAGRAPH_END = re.compile(
    r"\n\s*\n|\n?^\s*(?:Args|Attributes|Returns|Raises|Yields|Examples?):\s*$|\n(?=\s+[\w, ]+: )", re.MULTILINE
)


def sentences(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each sentence of a file's docstrings, comments and error texts, with its line."""
    code = path.read_text(encoding="utf-8")
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            line = node.body[0].lineno if node.body else 1
            for paragraph in PARAGRAPH_END.split(text):
                if not paragraph.lstrip().startswith((">>>", "...")):
                    yield from ((sentence, line) for sentence in split_sentences(paragraph))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                if isinstance(argument, ast.JoinedStr) or isinstance(getattr(argument, "value", None), str):
                    yield from ((sentence, node.lineno) for sentence in split_sentences(error_text(argument)))
    yield from ((sentence, line) for text, line in comments(code) for sentence in split_sentences(text))


def comments(code: str) -> Iterator[tuple[str, int]]:
    """Yield each comment of a file, lines that follow each other as one, with the number of its last line."""
    text, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# fmt:", "# noqa")):
            if token.start[0] != last + 1:
                yield text, last
                text = ""
            text, last = f"{text} {token.string.lstrip('# ')}", token.start[0]
    yield text, last


def split_sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph, without short ones."""
    flat = " ".join(paragraph.split())
    return [sentence for sentence in SENTENCE_END.split(flat) if len(sentence.split()) >= SHORTEST_SENTENCE]


def error_text(argument: ast.expr) -> str:
    """Return a string literal as a user reads it, with `{...}` where a value stands."""
    if isinstance(argument, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in argument.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    return str(argument.value) if isinstance(argument, ast.Constant) else ""


def names(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield each name that a file gives: kind, name, number of the line that gives it."""
    yield "file", str(path.relative_to(ROOT)), 1
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name, node.lineno
        elif isinstance(node, ast.FunctionDef):
            yield "function", node.name, node.lineno
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from (
                ("parameter", f"{a.arg} of {node.name}", a.lineno) for a in arguments if a.arg not in {"self", "cls"}
            )
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and len(node.id) > 1:
            yield "variable", node.id, node.lineno


@cache
def everything() -> tuple[dict[str, tuple[Path, int]], dict[tuple[str, str], tuple[Path, int]]]:
    """Return all sentences and all (kind, name) of the package, each with its first place."""
    all_sentences: dict[str, tuple[Path, int]] = {}
    all_names: dict[tuple[str, str], tuple[Path, int]] = {}
    for path in sorted((ROOT / "checkpoints_zoo").rglob("*.py")):
        for sentence, line in sentences(path):
            all_sentences.setdefault(sentence, (path, line))
        for kind, name, line in names(path):
            all_names.setdefault((kind, name), (path, line))
    return all_sentences, all_names


def draw(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return random sentences and random names of the package, each with its place."""
    all_sentences, all_names = everything()
    rng = random.Random(seed)
    drawn_sentences = rng.sample(sorted(all_sentences), count)
    drawn_names = rng.sample(sorted(all_names), count)
    return (
        [f"{text}  [{_place(*all_sentences[text])}]" for text in drawn_sentences],
        [
            f"{kind} {name}: {_code(*all_names[kind, name])}  [{_place(*all_names[kind, name])}]"
            for kind, name in drawn_names
        ],
    )


def _place(path: Path, line: int) -> str:
    """Return a line's file and number."""
    return f"{path.relative_to(ROOT)}:{line}"


def _code(path: Path, line: int) -> str:
    """Return the statement or the signature that a line belongs to, on one line, cut after 250 characters."""
    code = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.stmt):
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno or node.lineno
            if node.lineno <= line <= last:
                return textwrap.shorten(" ".join(code.splitlines()[node.lineno - 1 : last]), 250)
    return "".join(code.splitlines()[line - 1 : line])


def main() -> None:
    """Print the drawn sentences and names."""
    parser = argparse.ArgumentParser(prog="python -m docs.make.readability", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="of sentences, and of names (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    options = parser.parse_args()
    for title, lines in zip(("Sentences", "Names"), draw(options.count, options.seed), strict=True):
        print(f"\n{title}\n")
        print("\n".join(f"{number:3}. {line}" for number, line in enumerate(lines, 1)))


if __name__ == "__main__":
    main()
