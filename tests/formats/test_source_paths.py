"""Paths inside a source are refused by rules that are the same on every system."""

from __future__ import annotations

from checkpoints_zoo.formats.source_paths import path_refusal

GOOD = [
    "a",
    "shards/tiny/00000-3f9a1c2b.safetensors",
    "a b/ü.safetensors",
    "a..b/c...",
    "~x/-y",
    "a/.hidden",
    "x" * 255,
    "ü" * 127,
]
OUT = ["../a", "a/../../b", "..", "a/..", "/a", "//a", "/", ".. /a", "a/... /b", ". ./a", "a/ ./b", " /a"]
LONG = ["x" * 256, "a/" + "ü" * 128, "/".join(["x" * 250] * 20)]
ODD = ["", "a\\b", "..\\a", "C:/a", "c:a", "a\0b", "\\\\host\\a", "file:///a", "a:stream"]
UNTIDY = ["./.", "a//b", "./a", "a/./b", "a/", "a/b/"]


def test_paths_of_a_manifest_by_rules_that_are_the_same_everywhere() -> None:
    assert [path_refusal(p) for p in GOOD] == [""] * len(GOOD)
    assert [p for p in OUT if not path_refusal(p).endswith(", which leads out of it")] == []
    assert {path_refusal(p).partition(", ")[2] for p in LONG} == {"which is longer than a file system takes"}
    assert {path_refusal(p).partition(", ")[2] for p in ODD} == {"which is empty or has a NUL, a backslash or a colon"}
    assert [p for p in UNTIDY if not path_refusal(p).endswith(", which is no plain path")] == []
    assert len(path_refusal("../" + "x" * 10_000)) < 300
