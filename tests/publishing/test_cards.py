"""The card: every number is the manifest's, every sentence is true of it, nothing from a file becomes markup."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import arrow_tables, manifest, row_checks
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.publishing import cards
from tests.formats.test_text import READER

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "checkpoints_zoo" / "embedded"
REPO = "alice/zoo"
LAYOUT = Layout.of([("w", "F16", (4, 3)), ("n.running_var", "F32", (2,))])
ABOUT = Description("some", "Some nets", "net", {"width": 4}, "digits", ("a", "b"), {"size": [8, 8]},
                    {"only": LAYOUT}, "MIT", "Me, 2026")  # fmt: skip
ROW: dict[str, Any] = {
    "epoch": 9, "final": True, "status": "ok", "path": "shards/some/00000-0a1b2c3d.safetensors", "offset": 4096,
    "nbytes": LAYOUT.nbytes, "layout": "only", "dtype": "F16",
}  # fmt: skip
Collections = dict[str, tuple[Description, pa.Table]]


def some(*rows: dict[str, Any], about: Description = ABOUT, **same: Any) -> Collections:
    """A source of one collection, with these rows; `same` is in each of them."""
    return {"some": (about, manifest.build_manifest({"member": i} | ROW | same | row for i, row in enumerate(rows)))}


def front(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    return found


def body(text: str) -> str:
    return text.split("\n---\n", 1)[1]


def tables(text: str) -> list[list[list[str]]]:
    """The text in the cells of each table, by Markdown's own reader; the code's marks are gone."""
    found: list[list[list[str]]] = []
    in_table = False
    for t in READER.parse(body(text)):
        in_table = t.type == "table_open" or (in_table and t.type != "table_close")
        if t.type == "table_open":
            found.append([])
        elif t.type == "tr_open":
            found[-1].append([])
        elif in_table and t.type == "inline":
            found[-1][-1].append("".join(c.content for c in t.children or []))
    return found


@cache
def shipped() -> Collections:
    """The two collections in the package whose members have one recipe without varied fields."""
    found = {}
    for name in ("convnet-digits", "resnet8-digits"):
        path = EMBEDDED / "manifests" / f"{name}.json"
        description = Description.from_json(json.loads(path.read_text()), path)
        found[path.stem] = description, manifest.read_manifest(path.with_suffix(".parquet"))
    return found


def test_the_numbers_are_the_manifests() -> None:
    text = cards.card(shipped(), REPO)
    overview, *others = tables(text)
    for line, name, dtype in zip(overview[1:], ("convnet-digits", "resnet8-digits"), ("32", "16"), strict=True):
        rows = pq.read_table(EMBEDDED / "manifests" / f"{name}.parquet").to_pandas()
        accuracy = 100 * rows["test_accuracy"].to_numpy()
        mean, spread, low, high = (
            f"{v:.2f}" for v in (accuracy.mean(), accuracy.std(ddof=1), *np.sort(accuracy)[[0, -1]])
        )
        kilobytes = f"{rows['nbytes'].sum() / 1000:.1f} kB"
        net = name.removesuffix("-digits")
        assert line == [
            name,
            str(len(rows)),
            net,
            "digits",
            f"{mean} ± {spread} ({low} to {high})",
            kilobytes,
            f"float{dtype}",
        ]
        figures, training = others.pop(0), others.pop(0)
        for figure, *numbers, members in figures[1:]:
            values = rows[figure].to_numpy()
            wanted = values.mean(), values.std(ddof=1), values.min(), values.max()
            assert [float(n) for n in numbers] == pytest.approx(wanted, rel=6e-4, abs=1e-12)  # four digits are shown
            assert members == str(len(rows))
        assert [f[0] for f in figures[1:]] == [c for c in cards.FIGURE_COLUMNS if rows[c].notna().any()]
        for column, value in training[1:]:
            assert value == (f"{rows[column][0]:%Y-%m-%d}" if column == "created" else f"{rows[column][0]}")
            assert rows[column].nunique() == 1 or column == "created"
        assert [f[0] for f in training[1:]] == [c for c in cards.TRAINING_COLUMNS if rows[c].notna().any()]
        parts = ", ".join(f"`{split}` {n}" for split, n in sorted(rows["split"].value_counts().items()))
        assert f"by the column `split`: {parts}." in text
    (columns,) = others
    kept = [any(not arrow_tables.is_null(rows, n) for _, rows in shipped().values()) for n in SCHEMA.names]
    assert [c[0] for c in columns[1:]] == [n for n, k in zip(SCHEMA.names, kept, strict=True) if k]
    assert "A member is stored as 19,810 `float16` and 336 `float32` values, 40.97 kB." in text
    assert "The weights of 80 trained networks in 2 collections, as safetensors." in text


def test_the_front_matter() -> None:
    assert front(cards.card(shipped(), REPO)) == {
        "pretty_name": "zoo",
        "license": "apache-2.0",
        "tags": ["checkpoints", "safetensors", "uncertainty", "bayesian-neural-networks", "deep-ensembles",
                 "weight-space-learning", "checkpoints_zoo"],
        "size_categories": ["n<1K"],
        "configs": [
            {"config_name": "convnet-digits", "data_files": "manifests/convnet-digits.parquet", "default": True},
            {"config_name": "resnet8-digits", "data_files": "manifests/resnet8-digits.parquet"},
        ],
    }  # fmt: skip
    assert front(cards.card(some({}), REPO))["pretty_name"] == "Some nets"
    assert front(cards.card(some({}, about=replace(ABOUT, title="")), REPO))["pretty_name"] == "some"
    thousand = some(*[{}] * 1000)
    assert front(cards.card(thousand, REPO))["size_categories"] == ["1K<n<10K"]


@pytest.mark.parametrize(
    ("licences", "wanted"),
    [
        (["MIT"], {"license": "mit"}),
        (["MIT", "mit", "Apache-2.0"], {"license": ["apache-2.0", "mit"]}),
        (["ODbL-1.0"], {"license": "odbl"}),
        ([""], {"license": "unknown"}),
        (["GPL-3.0-or-later"], {"license": "other", "license_name": "gpl-3.0-or-later"}),
        (["MIT", "Ours: ask\n- me"], {"license": "other", "license_name": "mit-and-ours-ask-me"}),
        (["漢字"], {"license": "other", "license_name": "see-the-card"}),
        (["no"], {"license": "other", "license_name": "no"}),
    ],
)
def test_licences(licences: list[str], wanted: dict[str, Any]) -> None:
    several = {f"some{i}": (replace(ABOUT, licence=x), some({})["some"][1]) for i, x in enumerate(licences)}
    if wanted["license"] == "other":
        wanted = wanted | {"license_link": "https://huggingface.co/datasets/alice/zoo#licence"}
    text = cards.card(several, REPO)
    assert {k: v for k, v in front(text).items() if k.startswith("license")} == wanted
    assert "\n## Licence\n" in text


@pytest.mark.slow
def test_the_same_manifests_give_the_same_card() -> None:
    first = cards.card_files(shipped(), REPO)
    assert cards.card_files(dict(reversed(shipped().items())), REPO) == first
    assert list(first) == ["README.md", "cards/convnet-digits.png", "cards/resnet8-digits.png"]
    text = first["README.md"].decode()
    assert re.findall(r"!\[.*\]\((.*)\)", text) == list(first)[1:]
    assert text.endswith("\n")
    assert not re.search(r"\n{3}|[ \t]\n|\$", text)
    assert list(cards.card_files(some({}), REPO)) == ["README.md"]


def test_a_card_is_known_until_it_is_edited() -> None:
    text = cards.card(shipped(), REPO, "v1.0")
    assert cards.is_generated(text)
    assert cards.is_generated(text.replace("\n", "\r\n"))
    for edited in (text + "\nMy own words.\n", text.replace("apache-2.0", "mit"), text.replace("80", "81"), ""):
        assert not cards.is_generated(edited)
    mark = re.findall(r"<!--.*-->", text)[0]
    for other in (f"# Mine\n{mark}\n", mark, "---\nlicense: mit\n---\n# Mine\n", "\ud800"):
        assert not cards.is_generated(other)


ALL = {"test_accuracy": 0.5, "test_nll": 1.0, "eval_data": "digits/test", "seed": 3, "method": "independent",
       "sha256": "0" * 64, "split": "train", "lr": 0.1}  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "with_it", "without"),
    [
        ("trained independently of each other", [ALL, ALL], [ALL, ALL | {"method": None}]),
        ("trained independently of each other", [ALL, ALL], [ALL, ALL | {"method": "swag"}]),
        ("trained independently of each other", [ALL, ALL], [ALL]),
        ("by method: `swag`, from 2 runs.", [{"method": "swag", "run": 0}, {"method": "swag", "run": 1}], [ALL]),
        ("deep-ensembles", [ALL], [{"method": "swag"}]),
        ("Each member's seeds are in the manifest: `seed`.", [ALL, ALL], [ALL, ALL | {"seed": None}]),
        ("content hash is in the column", [ALL, ALL], [ALL, ALL | {"sha256": None}]),
        ("Members for learning on weights", [ALL], [ALL, ALL | {"split": None}]),
        ("Test accuracies are not known yet: the manifest has none.", [{}, {}], [{}, ALL]),
        ("`zoo-cli import --evaluate` measures them", [{}], [ALL]),
        ("| `some` | 2 | `net` | `digits` | not known |", [{}, {}], [{}, ALL]),
        ("zoo.evaluate(members)", [ALL], [{}]),
        ("The test figures were measured with the weights as they are stored", [ALL], [{"train_loss": 1.0}]),
        ("computed in float32, on `digits/test`.", [ALL], [ALL, ALL | {"eval_data": "other/test"}]),
        ("on `digits/test` (1 member), `other/test` (1 member).", [ALL, ALL | {"eval_data": "other/test"}], [ALL]),
        ("the manifest does not name the test set.", [{"test_accuracy": 0.5}], [ALL]),
        ("mean ± standard deviation (lowest to highest)", [ALL, ALL], [ALL, {}]),
        ("50.00, of 1 member |", [ALL, {}], [ALL]),
        ("![", [ALL], [{"test_nll": 1.0}]),
        ("How the members were trained", [ALL], [{"test_accuracy": 0.5}]),
        ("| `lr` | `0.1` (1 member without) |", [ALL, {}], [ALL, ALL]),
        ("| `lr` | `0.1` (1 member), `0.2` (2 members) |", [{"lr": 0.2}, ALL, {"lr": 0.2}], [ALL]),
        ("| `lr` | `1` to `9` |", [{"lr": float(i)} for i in range(1, 10)], [ALL]),
        ("| `created` | `1970-01-02` |", [{"created": 90_000}], [ALL]),
        ("Not loaded unless asked for", [ALL, {"status": "failed"}], [ALL]),
        ("Beside the final weights there are", [ALL, {"member": 0, "epoch": 3, "final": False}], [ALL]),
        ("calls the only part of a table", [ALL], [{"status": "failed"}]),
        ("hf_hub_download", [ALL], [ALL | {"path": "models/a.tgz"}]),
    ],
)
def test_a_sentence_stands_where_it_is_true(
    sentence: str, with_it: list[dict[str, Any]], without: list[dict[str, Any]]
) -> None:
    about = replace(ABOUT, architecture="mlp") if "evaluate(" in sentence else ABOUT
    assert sentence in cards.card(some(*with_it, about=about), REPO)
    assert sentence not in cards.card(some(*without, about=about), REPO)


def test_what_is_left_out_and_why() -> None:
    broken = [{"status": "failed", "reason": "loss | is <nan>"}] * 2 + [{"status": "failed"}]
    other = [{"status": "excluded", "reason": f"reason {i}"} for i in range(7)]
    text = cards.card(some(ALL, *broken, *other), REPO)
    assert (
        "Not loaded unless asked for: 3 rows with status `failed` (member `1`, `2`, `3`): loss \\| is \\<nan\\> (2), "
        "no reason given (1). 7 rows with status `excluded` (member `4`, `5`, `6`, `7`, `8`, …): `reason 0` (1), "
        "`reason 1` (1), `reason 2` (1), `reason 3` (1), `reason 4` (1), other reasons (2)."
    ) in text
    assert "The weights of 1 trained network, as safetensors." in text


def test_snapshots() -> None:
    early = [{"member": m, "epoch": e, "final": False} for m in (0, 1) for e in (2, 5)]
    text = cards.card(some(ALL, ALL, *early), REPO)
    assert "there are 4 snapshots of 2 members, at epoch `2`, `5`: `zoo.load(…, snapshots=True)`" in text
    assert f"| {6 * LAYOUT.nbytes} B |" in text


def test_stored_predictions_are_named() -> None:
    text = cards.card(some(ALL), REPO, predictions={"some": ("svhn-test", "cifar10-test"), "other": ("x",)})
    assert 'under the names `cifar10-test`, `svhn-test`: `members.predictions("cifar10-test")` reads them' in text
    assert "Logits of its members" not in cards.card(some(ALL), REPO, predictions={"other": ("x",)})


def test_weights_elsewhere() -> None:
    commit = "0123456789" * 4
    about = replace(ABOUT, base=f"hf://datasets/org/old-_name_@{commit}")
    text = cards.card(some(ALL, about=about), REPO)
    assert "Manifests of 1 trained network, whose weights lie in another repo." in text
    link = rf"[org/old-\_name\_](https://huggingface.co/datasets/org/old-_name_/tree/{commit}), at commit `{commit}`."
    assert f"The weights are not in this repo, which holds their manifest: they lie in {link}" in text
    assert f'hf_hub_download("org/old-_name_", "{ROW["path"]}", revision="{commit}", repo_type="dataset")' in text
    assert "not in this repo" not in cards.card(some(ALL), REPO)
    both = cards.card({"a": some(ALL)["some"], "b": some(ALL, about=about)["some"]}, REPO)
    assert "The weights of 2 trained networks in 2 collections, as safetensors, some of them in another repo." in both


def test_archives() -> None:
    about = replace(ABOUT, layouts={"only": replace(LAYOUT, header_nbytes=512)})
    text = cards.card(some(ALL | {"path": "models/a.tgz"}, about=about), REPO)
    assert "They lie in tar archives, each member as a safetensors file of its own: `models/a.tgz`." in text
    assert "safe_open" not in text


@pytest.mark.parametrize("rows", [[], [{"status": "failed", **dict.fromkeys(row_checks.LOCATION_COLUMNS)}]])
def test_nothing_to_load(rows: list[dict[str, Any]]) -> None:
    text = cards.card(some(*rows), REPO)
    assert "0 trained networks" in text
    assert "## Loading" not in text
    assert tables(text)[0][1] == ["some", "0", "net", "digits", "not known", "0 B", "none"]


@pytest.mark.parametrize(
    ("collections", "repo", "revision", "message"),
    [
        ({}, REPO, None, "card: expected one collection or more; found none."),
        (some({}), "zoo", None, "repo of the card: expected ORG/NAME; found 'zoo'."),
        (some({}), 'a/b")', None, "repo of the card: expected ORG/NAME; found 'a/b\")'."),
        (some({}), REPO, 'v1" or', "revision of the card: expected a branch, tag or commit; found 'v1\" or'."),
    ],
)
def test_what_is_refused(collections: Collections, repo: str, revision: str | None, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cards.card(collections, repo, revision)
    assert str(caught.value) == message
    with pytest.raises(UsageError, match="collection name"):
        cards.card({"Some|": some({})["some"]}, REPO)


@pytest.mark.slow
def test_neither_torch_nor_pandas_is_needed() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom checkpoints_zoo.formats import catalog, manifest\n"
        "from checkpoints_zoo.publishing import cards\n"
        f"path = Path({str(EMBEDDED / 'manifests' / 'convnet-digits.json')!r})\n"
        "about = catalog.Description.from_json(catalog.read_json(path), path)\n"
        "rows = manifest.read_manifest(path.with_suffix('.parquet'))\n"
        "assert len(cards.card_files({about.name: (about, rows)}, 'a/b')) == 2\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
