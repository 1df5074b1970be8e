"""What four kinds of new users met, from a fresh clone and from the wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pyarrow as pa
import pytest
import torch
from PIL import Image

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import COMMANDS, main
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import LayoutError, SourceNotFound, UsageError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.images import DATASETS, ImageData
from checkpoints_zoo.publishing import card_pictures, card_sections, cards
from checkpoints_zoo.sources import hub_errors
from checkpoints_zoo.training import population
from checkpoints_zoo.training.optimizers import first_adam_state, scaled_step
from checkpoints_zoo.training.population import Progress, StackTrainer, train_stack
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits, mlp_digits, recipe_from_options
from checkpoints_zoo.training.retrain import retrain
from checkpoints_zoo.training.seeds import derive_seed, epoch_order
from tests.hub import Hub
from tests.publishing.test_cards import ABOUT, ALL, REPO, some
from tests.support import few_digits as digits
from tests.support.commands import ROOT, ZOO, run, values
from tests.support.logs import logged
from tests.support.remote import ADDRESS, published
from tests.support.reports import Drawn
from tests.support.scenarios import SCHEMA, build
from tests.support.tiny import TINY, stored

CLAIMS = SCHEMA.append(pa.field("eval_data", pa.string()))
ADAM = replace(
    convnet_digits(), name="adam", optimizer="adam", lr=0.003, epochs=4, batch_size=33, stack_width=2, save_every=1
)
WRITERS = {  # commands that write a file -> the option that names it
    "demo": ("demo", "--out", "{place}"),
    "report": ("report", "convnet-digits", "--out", "{place}/page.html"),
    "plot": ("plot", "convnet-digits", "--out", "{place}/figures.png"),
    "evaluate": ("evaluate", "convnet-digits", "--plot", "{place}/figures.png"),
    "pairwise": ("pairwise", "convnet-digits", "--out", "{place}/pairs.csv"),
    "pairwise picture": ("pairwise", "convnet-digits", "--plot", "{place}/pairs.png"),
    "mmd": ("mmd", "convnet-digits", "--plot", "{place}/mmd.png"),
    "symmetries": ("symmetries", "convnet-digits", "--plot", "{place}/mass.png"),
    "align": ("align", "convnet-digits", "--save", "{place}/permutations.parquet"),
    "compact": ("compact", "convnet-digits", "--plot", "{place}/compact.png"),
    "compact-table": ("compact-table", "mlp-digits", "--latex", "{place}/table.tex"),
    "compare": ("compare", "convnet-digits", "--json", "{place}/compared.json"),
    "predict": ("predict", "convnet-digits", "--data", "digits", "--out", "{place}"),
    "download": ("download", "convnet-digits", "--dest", "{place}"),
    "train": ("train", "convnet-digits", "--members", "0", "--out", "{place}"),
    "import": ("import", "{source}", "--collection", "x", "--reshard", "{place}"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_place_that_can_not_be_written_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 33. A file stands where a folder is needed, which root meets as other users do."""

    def work(*arguments: object, **options: object) -> None:
        raise AssertionError("the command began its work")

    for function in (
        "collection.collection.load", "sources.finding.select_members", "training.recipes.recipe_from_options",
        "cli.importing.ingest",
    ):  # fmt: skip
        monkeypatch.setattr(f"checkpoints_zoo.{function}", work)
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "out"
    result = run(*(word.format(place=place, source=tmp_path) for word in WRITERS[name]))
    assert (result.exit_code, result.stdout) == (3, ""), result.stderr
    assert "expected a place that can be written to; found Not a directory: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_merging_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """Case 29."""
    there = stored([0], tmp_path / "there")
    result = run("train-merge", there, tmp_path / "missing", "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert f"folder {tmp_path / 'missing'}: expected members that were trained; found nothing there" in result.stderr
    (tmp_path / "empty").mkdir()
    result = run("train-merge", there, tmp_path / "empty", "--out", tmp_path / "out")
    assert (result.exit_code, f"folder {tmp_path / 'empty'}: expected members" in result.stderr) == (3, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_defaults_and_an_example(name: str) -> None:
    """Case 38."""
    text = run(name, "-h").stdout
    assert text == run(name, "--help").stdout
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for option in command.params:
        if isinstance(option.default, str | int) and not isinstance(option.default, bool):
            assert f"[default: {option.default}" in " ".join(text.split()), option.opts
    for line in COMMANDS[name].examples:
        assert f"\n    {line}\n" in f"{text}\n"
        program, first, *arguments = shlex.split(line)
        assert (program, first) == ("zoo-cli", name)
        command.make_context(name, arguments)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """Case 38."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"_ZOO_CLI_COMPLETE={shell}_source zoo-cli" in page
    words = {"COMP_WORDS": "zoo-cli ev", "COMP_CWORD": "1" if shell != "fish" else "ev"}
    environment = {**os.environ, **words, "_ZOO_CLI_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(ZOO, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "evaluate" in done.stdout


@pytest.mark.slow
def test_bars_of_other_packages_do_not_flood_a_log(hub: Hub, tmp_path: Path) -> None:
    """Case 38."""
    published(hub)
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    command = [*ZOO, "show", "tiny", "--source", ADDRESS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--source", ADDRESS),
        ("show", "tiny", "--source", ADDRESS),
        ("verify", ADDRESS),
        ("audit", ADDRESS),
        ("evaluate", "convnet-digits", "-n", "2", "--data", "cifar10"),
        ("download", "tiny", "--source", ADDRESS, "--dry-run"),
        ("import", ADDRESS, "--collection", "x", "--out", "{folder}", "--dry-run"),
        ("publish", "{folder}/source", "--repo", "alice/zoo", "--dry-run"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_a_network_the_error_comes_at_once(
    arguments: tuple[str, ...],
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 38. Nothing waits, and the client's own lines of retries are not shown."""

    def no_wait(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    build(tmp_path / "source", members=range(2))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # else a warning says that it was changed too late
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", no_wait)
    monkeypatch.setattr(hub_errors, "_reached_addresses", set())
    with logged() as records:
        result = run(*(word.format(folder=tmp_path) for word in arguments))
    assert result.exit_code == 5, result.stderr
    assert "expected an answer from 127.0.0.1:9; found ConnectionError: [Errno 111] Connection refused" in result.stderr
    assert not records


@pytest.mark.parametrize("name", ["evaluate", "pairwise"])
def test_no_images_out_of_distribution_by_name(name: str) -> None:
    """`--ood none` means the same in all commands."""
    arguments = (name, "convnet-digits", "-n", "3", "--format", "json")
    result = run(*arguments, "--ood", "none")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == run(*arguments).stdout


def checks(*arguments: str | Path) -> dict[str, object]:
    """Return what `zoo-cli verify` tells of the one collection that it checked."""
    (line,) = values(run("verify", *arguments, "--format", "json"))["checked"]
    return {key: line[key] for key in ("members", "read", "hashed", "measured", "impossible", "problems")}


def test_verify_tells_what_it_checked_and_what_it_could_not(tmp_path: Path) -> None:
    """Case 28."""
    assert checks("convnet-digits", "--sample", "3") == {
        "members": 64, "read": 64, "hashed": 64, "measured": 3, "impossible": {}, "problems": 0,
    }  # fmt: skip
    built = build(tmp_path, members=range(5))
    for row in built.rows[:2]:
        row["test_accuracy"] = None
    built.rows[2]["sha256"] = None
    built.rows[2]["eval_data"] = built.rows[3]["eval_data"] = "mine/test"
    built.rows[4]["eval_data"] = "digits/test"
    built.write(CLAIMS)
    no_accuracy = "accuracy, since the rows have none"
    no_images = "accuracy, since the package does not have the images 'mine/test' (give them as data)"
    result = checks("tiny", "--source", tmp_path)
    assert result["impossible"] == {no_accuracy: 2, "hash, since the rows have none": 1, no_images: 2}
    assert (result["members"], result["read"], result["hashed"], result["measured"]) == (5, 5, 4, 1)
    text = run("verify", "tiny", "--source", tmp_path).stdout
    assert "tiny: checked bytes and values 5 of 5, hash 4 of 5, accuracy 1 of 5\n" in text
    assert f"tiny: not checked: {no_images}: 2 members\n" in text
    built.description["architecture"] = "unknown"
    built.rows[2]["eval_data"] = built.rows[3]["eval_data"] = "digits/test"
    built.write(CLAIMS)
    no_network = "accuracy, since the package does not have the network 'unknown' (give it as architecture)"
    assert checks("tiny", "--source", tmp_path)["impossible"] == {
        no_accuracy: 2, "hash, since the rows have none": 1, no_network: 3,
    }  # fmt: skip


@pytest.mark.slow
def test_verify_measures_on_images_that_the_package_lacks(tmp_path: Path) -> None:
    """Case 28. The images are named as the manifest's claims name them."""
    built = build(tmp_path / "source", members=range(2))
    digits = zoo.images.load("digits")
    members = zoo.load("tiny", source=built.root)
    logits = members.ensemble()(members.preprocess(digits.images))
    for row, right in zip(built.rows, logits.argmax(-1) == digits.labels, strict=True):
        row |= {"eval_data": "mine/test", "test_accuracy": right.double().mean().item()}
    built.write(CLAIMS)
    for at, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
        path = tmp_path / "images" / str(int(label)) / f"{at:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    arguments = ("tiny", "--source", tmp_path / "source", "--data", tmp_path / "images")
    assert checks(*arguments)["measured"] == 2
    built.rows[1]["test_accuracy"] += 0.1
    built.write(CLAIMS)
    result = run("verify", *arguments)
    assert result.exit_code == 1
    assert "member 1 of tiny: accuracy: expected test accuracy " in result.stdout


def test_a_cut_shard_is_named_once(tmp_path: Path) -> None:
    build(tmp_path, members=range(6), per_shard=3)
    first, _ = sorted((tmp_path / "shards" / "tiny").iterdir())
    first.write_bytes(first.read_bytes()[:-20_000])
    result = run("verify", "tiny", "--source", tmp_path, "--sample", "0")
    assert result.exit_code == 1
    assert result.stdout.count(first.name) == 1
    assert "tiny: bytes: members 0-2: tensor " in result.stdout
    assert checks("tiny", "--source", tmp_path)["read"] == 3


def test_offline_verify_keeps_what_it_has_found(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    published(hub)
    assert run("download", "tiny", "--members", "2,15", "--source", ADDRESS).exit_code == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("verify", "tiny", "--source", ADDRESS, "--sample", "0")
    assert result.exit_code == 5
    assert "tiny: checked bytes and values 2 of 20, hash 2 of 20, accuracy 0 of 20\n" in result.stdout
    assert "tiny: not checked: bytes, since they could not be fetched: 18 members\n" in result.stdout
    assert "expected members in the cache, since HF_HUB_OFFLINE is set" in result.stderr
    assert "No problems" not in result.stdout


@pytest.mark.slow
def test_python_m_runs_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "checkpoints_zoo", "show", "none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize(
    ("net", "images", "needs"),
    [("mine", "digits", "`mine`"), ("mlp", "scans", "`scans`"), ("mlp", "digits", "")],
    ids=["net", "images", "neither"],
)
def test_the_card_says_what_members_of_ones_own_need(net: str, images: str, needs: str) -> None:
    """Case 32. An example that fails for the reader is not shown; no index is promised."""
    text = cards.card(some(ALL, about=replace(ABOUT, architecture=net, dataset=images)), REPO)
    assert ("zoo.evaluate(members)" in text) == (not needs)
    assert ("as `architecture=`" in text) == (net == "mine")
    assert ("`zoo.images.of` makes" in text) == (images == "scans")
    assert needs in text.split("## `some`")[0]
    assert "pip install checkpoints-zoo" not in text


def test_the_card_knows_the_images_of_the_package() -> None:
    """Case 32."""
    assert tuple(sorted(DATASETS)) == cards.IMAGE_SETS


@pytest.mark.parametrize("accuracies", [[1.0] * 3, [0.99, 1.0], [0.97, 0.98, 0.995]])
def test_the_axis_of_accuracies_ends_at_100_percent(accuracies: list[float]) -> None:
    """Case 32: beyond it there is no more than half of the last bar."""
    section = card_sections.Section("some", *some(*[ALL | {"test_accuracy": a} for a in accuracies])["some"])
    axes = card_pictures.draw_histograms(section).axes[0]
    last = max(bar.get_x() + bar.get_width() for bar in axes.patches)
    assert axes.get_xlim()[1] <= max(100, last)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "start"), [(".pdf", b"%PDF-"), (".svg", b"<?xml")])
def test_pictures_for_papers(ending: str, start: bytes, tmp_path: Path) -> None:
    """Case 34: the same bytes each time, and no hash on the picture."""
    first, second = (Drawn(1).plot(tmp_path / f"{i}{ending}").read_bytes() for i in range(2))
    assert first == second
    assert first.startswith(start)


def test_the_picture_of_an_alignment_leaves_the_reference_out() -> None:
    """Case 41: the member that the others are aligned to was a dot at (0, 0) and an outlier of every box."""
    from checkpoints_zoo.populations.alignment_table import draw_alignment

    members = zoo.load("convnet-digits", n=6)
    for to, count in ((members.ids[2], 5), ("mean", 6)):
        result = zoo.alignment(members, to=to)
        distances, transpositions = draw_alignment(result, None).axes
        (dots,) = distances.collections
        assert len(dots.get_offsets()) == count
        assert float(dots.get_offsets().min()) > 0
        # Whiskers and outliers of the boxes lie within the members' own shares.
        shares = [result.transpositions[n] / (size - 1) for n, size in result.sizes.items() if size > 1]
        least = min(float(share[result.before > 0].min()) for share in shares)
        assert min(float(x) for line in transpositions.lines for x in line.get_xdata()) == pytest.approx(least)


@pytest.mark.slow
def test_members_of_two_sources_are_joined(tmp_path: Path) -> None:
    """Case 39: as one collection whose weights, ids, labels and citation are those of its parts."""
    shipped = zoo.load("convnet-digits", members="3,5,7")
    built = build(tmp_path, net="convnet", members=(3, 8), name="other")
    built.description |= {n: getattr(shipped.description, n) for n in ("classes", "preprocessing", "dataset")}
    built.description["preprocessing"] = dict(shipped.description.preprocessing)
    built.description["classes"] = list(shipped.classes)
    built.write()
    other = zoo.load("other", source=tmp_path)
    both = shipped + other
    assert both.ids == [0, 1, 2, 3, 4]
    frame = both.manifest
    assert frame["collection"].tolist() == ["convnet-digits"] * 3 + ["other"] * 2
    assert frame["member_of_collection"].tolist() == [3, 5, 7, 3, 8]
    for name, tensor in both.stack().items():
        assert torch.equal(tensor, torch.cat([shipped.stack()[name], other.stack()[name]]))
    assert torch.equal(both.member(4).state_dict()["fc1.weight"], other.member(8).state_dict()["fc1.weight"])
    mixed = both.take([4, 0, 2])
    for name, tensor in mixed.stack().items():
        assert torch.equal(tensor, both.stack()[name][[4, 0, 2]])
    assert [ids for ids, _ in both.batches(2)] == [[0, 1], [2, 3], [4]]
    images = zoo.images.load("digits").images[:4]
    logits = torch.cat([part.ensemble()(part.preprocess(images)) for part in (shipped, other)])
    torch.testing.assert_close(both.ensemble()(both.preprocess(images)), logits)
    assert both.citation == f"{shipped.citation} + {other.citation}"
    again = zoo.load(both.citation)
    assert again.citation == both.citation
    assert torch.equal(again.stack()["fc1.weight"], both.stack()["fc1.weight"])
    assert zoo.load(mixed.citation).stack()["fc1.weight"].equal(mixed.stack()["fc1.weight"])
    assert (both + zoo.load("convnet-digits", members="9")).manifest["member_of_collection"].tolist()[-1] == 9
    aligned = both.align()
    assert torch.equal(aligned.stack()["fc1.weight"][0], both.stack()["fc1.weight"][0])
    assert zoo.evaluate(both, "digits", subsets=5).members == 5
    assert len(both.predict("digits", tmp_path / "out")) == 5


@pytest.mark.slow
def test_members_of_one_collection_are_joined_under_their_ids() -> None:
    """Case 39: parts of one collection, by name, citation or selection."""
    members = zoo.load("convnet-digits")
    both = members[:2] + members[4:6]
    assert (both.ids, both.name) == ([0, 1, 4, 5], "convnet-digits")
    assert both.citation == zoo.load("convnet-digits", members="0,1,4,5").citation
    by_names = zoo.load([members[:2].citation, members[4:6]])
    assert by_names.ids == both.ids
    canonical = members[:2].canonicalize(permute="norm") + members[2:4].canonicalize(permute="norm")
    assert torch.equal(
        canonical.stack()["conv1.weight"], members[:4].canonicalize(permute="norm").stack()["conv1.weight"]
    )


def test_collections_that_do_not_join_say_why(tmp_path: Path) -> None:
    """Case 39: clear errors where architectures differ."""
    members, other = zoo.load("convnet-digits", n=2), zoo.load("resnet8-digits", n=2)

    def text(call: object, kind: type[Exception] = UsageError) -> str:
        with pytest.raises(kind) as error:
            call()  # type: ignore[operator]
        return str(error.value)

    assert text(lambda: members + other) == text(lambda: zoo.load(["convnet-digits", "resnet8-digits"], n=2))
    found = text(lambda: members + other)
    assert found.startswith("architecture of convnet-digits and resnet8-digits, to join them: expected convnet(")
    assert "; found resnet8(" in found
    assert found.endswith("Join collections of one network, on the same inputs and classes.")
    assert text(lambda: members + members[1:]) == (
        "members to join: expected each member once; found member 1 of convnet-digits, twice. Select members that are "
        "not in the other collection."
    )
    assert text(lambda: members + zoo.load("convnet-digits", members="5").align()).startswith(
        "views of convnet-digits: expected the same canonical form of all members, or none; found weights as stored; al"
    )
    assert text(lambda: zoo.load([])) == "collections to join: expected one or more; found none."
    built = build(tmp_path, net="convnet", name="other")
    built.description |= {"classes": list("abcdefghij"), "preprocessing": dict(members.description.preprocessing)}
    built.write()
    assert text(lambda: members + zoo.load("other", source=tmp_path)).startswith(
        "classes of convnet-digits and other, to join them: expected 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, as convnet-digits"
    )
    built.description |= {"classes": list(members.classes)}
    built.write()
    joined = members + zoo.load("other", source=tmp_path)
    assert text(lambda: joined.download(tmp_path / "copy")).endswith("Download each collection by itself.")
    assert "expected members of one source" in text(lambda: joined.predictions("digits-test"), SourceNotFound)
    with pytest.raises(TypeError):
        members + 1  # type: ignore[operator]
    narrow = build(tmp_path / "mlp", net="mlp", name="narrow")
    narrow.description |= {k: getattr(members.description, k) for k in ("architecture", "arguments")}
    narrow.description |= {"classes": list(members.classes), "preprocessing": dict(members.description.preprocessing)}
    narrow.write()
    with pytest.raises(LayoutError, match=r"^tensors of convnet-digits and narrow, to join them: expected the "):
        members + zoo.load("narrow", source=tmp_path / "mlp")


def test_from_samples_checks_all_arguments_at_once(tmp_path: Path) -> None:
    """Case 35: one error names every problem; nothing is written."""
    states = [torch.nn.Linear(3, 2).state_dict()]
    with pytest.raises(UsageError) as error:
        zoo.from_samples(
            [states[0] | {"extra": torch.ones(1)}], lambda: torch.nn.Linear(3, 2), method="swag", out=tmp_path / "out",
            name="line", columns={"lr": [0.1, 0.2], "colour": "red"}, order=["nothing"],
        )  # fmt: skip
    text = str(error.value)
    assert text.startswith(
        "arguments of from_samples: expected valid ones; found 3 problems: (1) collection name 'line'"
    )
    assert all(part in text for part in ("(2) column 'colour'", "(3) order of flat draws"))
    with pytest.raises(UsageError, match=r"2 problems: \(1\) collection name 'line'.* \(2\) draw 0: .*extra"):
        zoo.from_samples(
            [states[0] | {"extra": torch.ones(1)}], lambda: torch.nn.Linear(3, 2), method="swag", out=tmp_path / "out",
            name="line",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_results_print_as_tables(tmp_path: Path) -> None:
    """Case 31: `print` shows a table, `repr` is one short line, and notebooks show the table, with escaped names."""
    members = zoo.load("convnet-digits", n=4)
    images = zoo.images.load("digits")
    results = {
        "Report": (zoo.evaluate(members, subsets=2), ["ensemble of", "accuracy (%)", "digits/test"]),
        "Pairwise": (zoo.pairwise(members, "digits"), ["mi_id", "6 pairs of 4 members"]),
        "NS": (zoo.ns(members, permutations=9), ["ns_mmd2", "conv1", "2 against 2 members"]),
        "MMD": (zoo.mmd(members, permutations=9), ["mmd2", "conv1"]),
        "ImageData": (images, ["540 × 1 × 8 × 8", images.fingerprint]),
        "PredictiveComparison": (zoo.compare_predictives(members[:2], members[2:]), ["agreement", "total_variation"]),
        "Alignment": (zoo.alignment(members), ["transpositions", "Aligned to member 0"]),
        "Barriers": (zoo.barrier(members, points=3), ["barrier (nats)"]),
    }
    for name, (result, words) in results.items():
        assert type(result).__name__ == name
        line, text = repr(result), str(result)
        assert line.startswith(f"{name}(")
        assert "\n" not in line
        assert len(line) < 250
        assert text.count("\n") > 2
        assert max(map(len, text.splitlines())) < 200
        for word in words:
            assert word in text
        assert result._repr_html_().startswith("<pre>")
    odd = replace(images, name="<b>x")
    assert "&lt;b&gt;x" in odd._repr_html_()
    assert str(zoo.metrics.Interval(0.5, 0.25, 0.75)) == "0.5 [0.25, 0.75]"
    assert str(zoo.metrics.Interval(0.5, None, None)) == "0.5"


@pytest.mark.parametrize(
    ("threads", "compared", "words"),
    [
        (
            ", 7 threads",
            "accuracy",
            ", 7 threads, here {torch} on {device}; last bits depend on the number of threads)",
        ),
        ("", "accuracy", "; last bits depend on the number of threads; the number of threads is not in its row)"),
        (None, "bytes", "expected sha256 0000000000000000…; found "),
    ],
)
def test_members_are_trained_again_on_another_number_of_threads(
    threads: str | None, compared: str, words: str, tmp_path: Path
) -> None:
    """Case 30: the row has the number; other bits on another number are no false claim. With workers it is smaller."""
    members = zoo.load("tiny", source=stored([0], tmp_path))
    row = members.member(0).row
    count = torch.get_num_threads()
    assert row["device"].endswith(f", {count} thread{'s' if count > 1 else ''}")
    device = row["device"] if threads is None else row["device"].rpartition(", ")[0] + threads
    rows = manifest.build_manifest([dict(row) | {"sha256": "0" * 64, "device": device}])
    [result] = retrain(Collection(members.source, members._commit, members.description, rows), 1, TINY)
    assert (result.compared, result.same) == (compared, compared == "accuracy")
    assert words.format(torch=row["torch_version"], device=row["device"]) in result.text


def train_with_torch(recipe: Recipe, member: int, data: ImageData) -> dict[str, torch.Tensor]:
    """Train a member by torch's optimizer on the batches that its seed draws; return its weights."""
    torch.manual_seed(derive_seed(member, "init"))
    module = recipe.module()
    build = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    betas = (recipe.momentum, recipe.beta2)
    optimizer = build(module.parameters(), recipe.lr, betas, recipe.epsilon, recipe.weight_decay)
    steps = len(data) // recipe.batch_size
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * steps)
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision == "float16")
    labels = data.labels
    assert labels is not None
    for epoch in range(recipe.epochs):
        order = epoch_order(member, epoch, len(data))
        for batch in order[: steps * recipe.batch_size].split(recipe.batch_size):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=recipe.precision == "float16"):
                logits = module(recipe.preprocess(data.images[batch]))
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[batch])
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("float16", 5e-4)])
def test_members_trained_by_adam_are_torchs(optimizer: str, precision: str, tolerance: float) -> None:
    """Case 40: members of a stack against a plain script, on average over the weights: a step moves them by 3e-3."""
    recipe = replace(ADAM, optimizer=optimizer, precision=precision, weight_decay=0.05, momentum=0.8, beta2=0.95)
    data = digits.some("train", 99)
    stacked = train_stack(recipe, (4, 9), data)
    for member in stacked:
        expected = train_with_torch(recipe, member.member, data)
        for name, tensor in expected.items():
            assert (member.state[name] - tensor).abs().mean().item() < tolerance


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_step_of_adam_with_an_overflow_is_no_step(optimizer: str) -> None:
    """Case 40: of the member whose gradient overflows; its next step is torch's first one."""
    recipe = replace(ADAM, optimizer=optimizer, precision="float16", weight_decay=0.05)
    params = {"w": torch.tensor([[1.0, -2.0], [0.5, 3.0]])}
    momentum, adam = {"w": torch.zeros(2, 2)}, first_adam_state(recipe, params)
    scaling = {"scale": torch.full((2,), 4.0), "steps": torch.zeros(2, dtype=torch.int64)}
    gradient = torch.tensor([[0.3, -0.7], [2.0, 0.1]])
    counts = [0, 0]
    for overflow in ([True, False], [False, False]):
        scaled = 4 * gradient * torch.where(torch.tensor(overflow), torch.inf, 1.0)[:, None]
        scaling["scale"].fill_(4.0)
        scaled_step(recipe, 0.01, params, momentum, adam, {"w": scaled}, scaling)
        counts = [count + (not skipped) for count, skipped in zip(counts, overflow, strict=True)]
    for at, steps in enumerate(counts):
        weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]][at]))
        build = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam
        expected = build([weight], 0.01, (recipe.momentum, 0.999), 1e-8, 0.05)
        for _ in range(steps):
            weight.grad = gradient[at].clone()
            expected.step()
        torch.testing.assert_close(params["w"][at], weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_run_of_adam_that_was_killed_goes_on(precision: str, tmp_path: Path) -> None:
    """Case 40: bit for bit, from the state that was saved; and a member's place in the stack does not matter."""
    recipe, data = replace(ADAM, precision=precision, stack_width=3), digits.some("train", 99)

    def kill(progress: Progress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_stack(recipe, (1, 2, 3), data, tmp_path / "state.safetensors", kill)
    resumed = train_stack(recipe, (1, 2, 3), data, tmp_path / "state.safetensors")
    whole = {member.member: member.state for member in train_stack(recipe, (3, 5, 1), data)}
    for member in (resumed[0], resumed[2]):
        for name, tensor in member.state.items():
            assert tensor.numpy().tobytes() == whole[member.member][name].numpy().tobytes()


def test_recipes_of_adam() -> None:
    """Case 40: settings of Adam are no settings of SGD, and recipes of SGD keep their hashes."""
    recipe = recipe_from_options("convnet-digits", ("optimizer=adamw", "lr=0.001", "beta2=0.99"))
    assert (recipe.optimizer, recipe.beta2, recipe.epsilon) == ("adamw", 0.99, 1e-8)
    assert recipe.made_from == "convnet-digits beta2=0.99 lr=0.001 optimizer=adamw"
    assert len({recipe.hash, replace(recipe, beta2=0.999).hash, replace(recipe, optimizer="adam").hash}) == 3
    assert not {"beta2", "epsilon"} & set(convnet_digits().to_json())
    with pytest.raises(UsageError, match=r"optimizer of .*: expected one of sgd, adam, adamw; found 'rmsprop'"):
        recipe_from_options("convnet-digits", ("optimizer=rmsprop",))
    for change, expected in (
        ("beta2=0.9", "0.999 with sgd: it belongs to the optimizers adam and adamw; found 0.9"),
        ("epsilon=1e-6", "1e-08 with sgd: it belongs to the optimizers adam and adamw; found 1e-06"),
    ):
        with pytest.raises(UsageError, match=expected):
            recipe_from_options("convnet-digits", (change,))
    with pytest.raises(
        UsageError, match=r"nesterov of .*: expected False: it belongs to the optimizer sgd; found True"
    ):
        recipe_from_options("convnet-digits", ("optimizer=adam", "nesterov=true"))


@pytest.mark.slow
def test_a_collection_trained_by_adam(tmp_path: Path) -> None:
    """Case 40: by the command, with the optimizer in the manifest, and trained again to the same bytes."""
    changes = ("optimizer=adamw", "lr=0.003", "epochs=1", "stack_width=2")
    settings = [part for change in changes for part in ("--set", change)]
    done = run("train", "convnet-digits", "--members", "0-1", "--name", "adam", *settings, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    members = zoo.load("adam", source=tmp_path)
    assert members.manifest["optimizer"].tolist() == ["adamw", "adamw"]
    assert float(members.manifest["test_accuracy"].min()) > 0.2
    done = run("verify", "adam", "--source", tmp_path, "--retrain", "1")
    assert done.exit_code == 0, done.output
    assert "bytes agree" in done.stdout


def test_the_printed_catalog_has_all_columns() -> None:
    """Case 31: in a narrow terminal too."""
    frame = zoo.collections()
    text = str(frame)
    assert all(column in text for column in frame.columns)
    assert "..." not in text.splitlines()[0]
    assert len(text.splitlines()) == 1 + len(frame)


@pytest.mark.parametrize(("recipe", "threads"), [(replace(mlp_digits(), stack_width=1), 1), (convnet_digits(), 2)])
def test_small_networks_train_on_one_thread(recipe: Recipe, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 37: a second thread of a tiny net waits; larger work has the threads that the user has set."""
    before, seen = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(population, "train_stack", lambda *a: seen.append(torch.get_num_threads()) or [])
    torch.set_num_threads(2)
    try:
        StackTrainer(recipe, None)((0,), "cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [threads]
