"""The columns of a manifest: their names, Arrow types and meanings.

`manifests/README.md` is generated from this table: `python -m docs.make manifests/README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 1  # of manifests whose members lie in their source
NEWEST_SCHEMA_VERSION = 2  # of manifests whose members lie in other repos: the column `parts`


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the manifest: its name, its Arrow type, whether every row must have a value, and the meaning of the
    values."""

    name: str
    type: pa.DataType
    required: bool
    meaning: str


def _make_columns(required: bool, type: pa.DataType, **meanings: str) -> list[Column]:
    return [Column(name, type, required, meaning) for name, meaning in meanings.items()]


COLUMNS: tuple[Column, ...] = (
    *_make_columns(
        True,
        pa.int32(),
        member="id of the training run, unique in the collection",
        epoch="epochs trained when the weights were taken, or steps where the description's `epoch_unit` says so",
    ),
    *_make_columns(True, pa.bool_(), final="whether this is the last snapshot of the member"),
    *_make_columns(True, pa.string(), status="`ok`, `failed` or `excluded`"),
    *_make_columns(
        False,
        pa.string(),
        reason="why the status is not `ok`",
        method="`independent`, or the posterior's method the draw comes from: `dropout`, `swag`, `laplace`, …",
    ),
    *_make_columns(False, pa.int32(), run="run of the method", draw="draw within the run"),
    *_make_columns(False, pa.int64(), seed="the member's seed, in [0, 2³²); of a member trained here, below 2³¹"),
    *_make_columns(
        False,
        pa.int32(),
        seed_init="seed of the initial weights, derived from `seed`",
        seed_order="seed of the order of the training images, derived from `seed`",
        seed_augment="seed of the augmentation, derived from `seed`",
    ),
    *_make_columns(
        False,
        pa.string(),
        run_id="hash of recipe hash and seed: the same for all snapshots of a run",
        split="`train`, `validation` or `test` (70/15/15) by the hash of `run_id`, for learning on weights",
    ),
    *_make_columns(
        False,
        pa.float64(),
        train_accuracy="share of training images classified correctly, 0..1",
        test_accuracy="share of test images classified correctly, 0..1, by the stored bytes computed in float32",
        train_loss="mean cross-entropy on the training images, nats",
        test_nll="mean negative log-likelihood on the test images, nats",
        test_brier="mean Brier score on the test images, summed over classes, 0..2",
        test_ece="expected calibration error on the test images, 15 equal-width bins, 0..1",
    ),
    *_make_columns(False, pa.string(), eval_data="name and split of the test images"),
    *_make_columns(False, pa.int32(), epochs="epochs of the whole recipe"),
    *_make_columns(False, pa.string(), optimizer="optimiser"),
    *_make_columns(
        False,
        pa.float64(),
        lr="highest learning rate",
        momentum="momentum; with adam and adamw, the first beta",
        weight_decay="weight decay, as torch's optimizer of this name counts it",
    ),
    *_make_columns(False, pa.int32(), batch_size="images a step"),
    *_make_columns(
        False,
        pa.string(),
        schedule="schedule of the learning rate",
        augmentation="augmentation of the training images",
        precision="number format the training computed in",
        recipe="name of the recipe",
        recipe_hash="hash of everything in the recipe that decides the result",
        data_fingerprint="hash of the training images and labels",
    ),
    *_make_columns(False, pa.int32(), stack_width="members trained together in one vectorised loop"),
    *_make_columns(
        False,
        pa.string(),
        code_version="version of this package that trained the member",
        torch_version="version of torch that trained the member",
        device="processor that trained the member, with its instructions and the number of threads; or GPU",
    ),
    *_make_columns(False, pa.float64(), wall_time_s="seconds of training, shared equally by the members of a stack"),
    *_make_columns(False, pa.timestamp("s", tz="UTC"), created="when training ended"),
    *_make_columns(
        False,
        pa.string(),
        sha256="content hash: names, shapes and values, whatever file and dtype they are stored in",
    ),
    *_make_columns(
        False,
        pa.string(),
        path="file within the source that holds the bytes; this and the next four are null only where there are none",
    ),
    *_make_columns(
        False,
        pa.int64(),
        offset="where the member's bytes begin in the file",
        nbytes="how many bytes they are",
    ),
    *_make_columns(
        False,
        pa.string(),
        layout="key into `layouts` of the JSON beside the manifest",
        dtype="dtype of the weights (statistics are always F32)",
    ),
)

PARTS = Column(
    "parts",
    pa.list_(pa.struct({"path": pa.string(), "offset": pa.int64(), "nbytes": pa.int64(), "etag": pa.string()})),
    False,
    "in schema version 2: ranges of files of other repos that hold the bytes, one after another; `path` and `offset` "
    "are those of the first, `nbytes` is their sum",
)


def _make_schema(columns: tuple[Column, ...], version: int) -> pa.Schema:
    fields = [pa.field(c.name, c.type, nullable=not c.required) for c in columns]
    return pa.schema(fields, metadata={"schema_version": str(version)})


SCHEMA = _make_schema(COLUMNS, SCHEMA_VERSION)
SCHEMA_WITH_PARTS = _make_schema((*COLUMNS, PARTS), NEWEST_SCHEMA_VERSION)
