"""Collections: positions and ids, stacks in batches, logits against modules loaded by hand."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection import reading
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import DamagedError, MemberNotFound, SelectionError, UsageError
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.images import ImageData
from tests.support.scenarios import NETS, Built, five, hand_made, load, raw


@pytest.fixture(scope="module", params=list(NETS))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return five(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def members(built: Built) -> Collection:
    return load(built)


def test_positions_and_ids(members: Collection) -> None:
    assert len(members) == 5
    assert [m.id for m in members] == members.ids == [0, 1, 2, 3, 4]
    assert (members[0].id, members[-1].id, members[np.int64(2)].id) == (0, 4, 2)
    assert members[1:4].ids == [1, 2, 3]
    assert members[::-2].ids == [4, 2, 0]
    assert members[-2:][0].id == 3
    assert members[::-1][1:3].member(2).id == 2
    assert (members.member(3).id, members.member(np.int32(3)).id) == (3, 3)  # type: ignore[arg-type]
    assert members[3].row["test_accuracy"] == pytest.approx(0.903)
    assert repr(members[3]) == "Member('tiny', 3, epoch 40, test accuracy 0.9030)"
    assert members.nbytes == sum(members.manifest["nbytes"])
    assert members.classes == tuple("0123456789")
    assert members.preprocess(torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)).flatten()[0] == pytest.approx(0.7 / 0.4)


@pytest.mark.parametrize(("position", "found"), [(5, "5"), (-6, "-6"), (2**70, str(2**70))])
def test_positions_out_of_range(members: Collection, position: int, found: str) -> None:
    with pytest.raises(MemberNotFound) as caught:
        members[position]
    assert str(caught.value) == (
        f"position {position} of tiny: expected one of the 5 selected members, from 0; found {found}."
        " `.member(id)` takes a member by its id."
    )


@pytest.mark.parametrize("position", ["3", 1.0, None, True, [0, 1], np.array([0, 1])])
def test_positions_that_are_no_whole_numbers(members: Collection, position: int) -> None:
    with pytest.raises(UsageError, match=r"^position of a member: expected a whole number or a slice; found "):
        members[position]


@pytest.mark.parametrize("member", [5, -1, "3", True, None, 1.5])
def test_ids_that_are_not_selected(members: Collection, member: int) -> None:
    with pytest.raises(MemberNotFound) as caught:
        members[:3].member(member)
    assert (
        str(caught.value) == f"member {member!r} of this selection of tiny: expected an id among 0-2; found {member!r}."
    )


def test_no_members_at_all(members: Collection) -> None:
    none = members[5:]
    assert (len(none), none.ids, list(none), none.nbytes) == (0, [], [], 0)
    images = ImageData("x", "test", torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    uses = [none.stack, none.ensemble, none.dataset, none._skeleton, none._locations, lambda: none.batches(2),
            lambda: none.citation, lambda: predictions.logits(none, images)]  # fmt: skip
    for use in uses:
        with pytest.raises(SelectionError) as caught:
            use()
        assert str(caught.value) == (
            "selection of tiny: expected one member or more; found none. A slice beyond the last position is empty."
        )


def test_logits_equal_a_loop(members: Collection, built: Built) -> None:
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (9, 1, 8, 8), dtype=np.uint8))
    x = (pixels.float() / 255 - 0.3) / 0.4
    wanted = torch.stack([hand_made(built, m)(x) for m in members.ids])
    for batch in (2, 9, 512):
        found = predictions.logits(members, ImageData("x", "test", pixels), batch=batch)
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


# Batches


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_batches_are_slices_of_the_stack(members: Collection, size: int, dtype: torch.dtype | None) -> None:
    whole = members.stack(dtype=dtype)
    seen: list[int] = []
    for ids, params in members.batches(size, dtype=dtype):
        at = len(seen)
        seen += ids
        assert {n: raw(t) for n, t in params.items()} == {n: raw(t[at : len(seen)]) for n, t in whole.items()}
    assert seen == members.ids


@pytest.mark.parametrize("size", [0, -1, True, "2", 1.5, None])
def test_bad_batch_sizes_are_refused(members: Collection, size: int) -> None:
    with pytest.raises(UsageError) as caught:
        members.batches(size)  # at once, not when the first is asked for
    assert str(caught.value) == f"size of a batch of members: expected a whole number from 1; found {size!r}."


def readers() -> int:
    return sum(t.name.startswith("zoo-read") for t in threading.enumerate())


@pytest.mark.slow
def test_batches_end_their_reader(members: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in members.batches(1):
        break
    stopped = members.batches(2)
    next(stopped)
    with pytest.raises(ZeroDivisionError):
        next(1 // 0 for _ in members.batches(2))
    del stopped
    gc.collect()
    assert readers() == 0
    real = reading.stack

    def fails(locations: list[Location], *args: object, **kwargs: object) -> dict[str, Tensor]:
        if locations[0].member == 2:
            raise DamagedError("the second batch")
        return real(locations, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "stack", fails)
    seen = []
    with pytest.raises(DamagedError, match="the second batch"):
        seen += [ids for ids, _ in members.batches(2)]
    for ids, _ in members.batches(2):  # and stopped before the error is met
        seen.append(ids)
        break
    gc.collect()
    assert seen == [[0, 1]]
    assert readers() == 0


def test_names_that_are_private_now_warn_for_one_version(members: Collection) -> None:
    old = {
        "at": members.__getitem__, "before": members._without_last_step, "commit": members._commit,
        "held_by": members._member_count_within, "keys": members._snapshot_keys, "locations": members._locations,
        "match_mean": members._mean_permutations,
        "member_nbytes": members._member_nbytes, "read": members._read, "skeleton": members._skeleton,
        "view": members._view,
    }  # fmt: skip
    for name, now in old.items():
        assert name not in dir(members)
        with pytest.warns(DeprecationWarning, match=f"^Collection.{name} is private from version 0.2 on, and goes in"):
            assert getattr(members, name) == now
    with pytest.raises(AttributeError, match=r"^'Collection' object has no attribute 'weights'$"):
        members.weights  # noqa: B018


def test_numpy_takes_stacked_weights_without_a_copy(members: Collection) -> None:
    stacked = members.stack(dtype=torch.float32)
    arrays = {name: np.from_dlpack(tensor) for name, tensor in stacked.items()}
    for name, array in arrays.items():
        assert array.tolist() == stacked[name].tolist()
        assert not array.size or array.ctypes.data == stacked[name].data_ptr()


def test_a_notebook_shows_text_of_a_source_as_text(tmp_path: Path) -> None:
    built = five(tmp_path, "convnet")
    path = built.manifest.with_suffix(".json")
    description = json.loads(path.read_text())
    description |= {"licence": "<b>mine</b>", "title": "Mine {and} 5 % of_yours\n", "citation": "A & B"}
    path.write_text(json.dumps(description))
    members = load(built)[1:4]
    assert members._repr_html_() == (
        "<pre>Collection(&#x27;tiny&#x27;, 3 members, convnet on digits, from "
        f"{tmp_path})\nmembers  1-3\nbytes    {members.nbytes / 1000:.4g} kB\nclasses  0, 1, 2, 3, 4, 5 and 4 more\n"
        "licence  &lt;b&gt;mine&lt;/b&gt;</pre>"
    )
    cited = members.citation.replace("#", r"\#").replace("~", r"\textasciitilde{}").replace("_", r"\_")
    assert members.bibtex == (
        "@misc{tiny,\n  title = {Mine and 5 \\% of\\_yours},\n"
        f"  howpublished = {{Trained networks, loaded by checkpoints\\_zoo from {cited}}},\n"
        "  note = {A \\& B},\n}"
    )
