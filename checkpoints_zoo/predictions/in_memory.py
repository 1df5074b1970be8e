"""Predictions in memory: logits that were computed now, and a posterior mean that a file of probabilities holds.

Axes: logits are (member, input, class), probabilities (input, class).
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo import images
from checkpoints_zoo.errors import FormatError, MemberNotFound, SourceNotFound, UsageError
from checkpoints_zoo.formats.text import count_with_noun, first_few, format_bytes
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.predictions.prediction_sets import SetDescription
from checkpoints_zoo.predictions.stored import Predictions
from checkpoints_zoo.sources import web

LARGEST_FILE_NBYTES = 2**30
SUM_TOLERANCE = 1e-3  # Largest difference of a row's sum from 1: files hold rounded numbers.
SMALLEST_PROBABILITY = 1e-300  # Smaller ones count as this, so that logarithms are finite.
SUSPICIOUS_ACCURACY = 1.5  # Accuracies below this multiple of chance tell of rows in another order.


class PredictionsInMemory(Predictions):
    """Logits of members on one set of images, in memory, used as stored predictions are.

    Args:
        facts: description of the images and classes.
        logits: logits (member, input, class).
        keys: (member id, epoch, hash of the weights) of each member.
        citation: citation of the members.
    """

    def __init__(
        self, facts: SetDescription, logits: Tensor, keys: Sequence[tuple[int, int, str]], citation: str
    ) -> None:
        self._facts, self._logits, self._keys, self._citation = facts, logits, list(keys), citation

    @property
    def facts(self) -> SetDescription:
        """The description of the images and classes."""
        return self._facts

    @property
    def shape(self) -> tuple[int, int, int]:
        """(members, inputs, classes)."""
        members, inputs, classes = self._logits.shape
        return members, inputs, classes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self._logits.dtype

    @property
    def ids(self) -> list[int]:
        """Ids of the members, in the order of the logits."""
        return [member for member, *_ in self._keys]

    @property
    def keys(self) -> list[tuple[int, int, str]]:
        """(member id, epoch, hash of the weights) of each member."""
        return self._keys

    @property
    def citation(self) -> str:
        """Citation of the members."""
        return self._citation

    def __len__(self) -> int:
        return len(self._keys)

    def _select(self, positions: list[int]) -> Predictions:
        keys = [self._keys[position] for position in positions]
        return PredictionsInMemory(self._facts, self._logits[positions], keys, self._citation)

    def logits(self, ids: Iterable[int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logits of members, (member, input, class).

        Raises:
            MemberNotFound: there is no member of one of the ids.
        """
        if ids is None:
            return self._logits.to(dtype)
        position_of_id = {member: position for position, member in enumerate(self.ids)}
        requested = list(ids)
        for member in requested:
            if member not in position_of_id:
                expected = f"one of {first_few([str(x) for x in position_of_id], 8)}"
                raise MemberNotFound(f"member {member!r} of {self.name}", expected=expected, found="no such member")
        return self._logits[[position_of_id[member] for member in requested]].to(dtype)

    def block(self, begin: int, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logits of some inputs, (member, input, class)."""
        return self._logits[:, begin:end].to(dtype)

    def one(self, at: int) -> Tensor:
        """Return the logits of the member at one position, (input, class)."""
        return self._logits[at]


class PosteriorMean(PredictionsInMemory):
    """The mean probabilities of a posterior, of which no members are known: figures of diversity are not defined.

    Args:
        facts: description of the images and classes.
        probabilities: (input, class), float64.
        digest: hash of the file that holds the probabilities.
        citation: name and hash of the file.
    """

    def __init__(self, facts: SetDescription, probabilities: Tensor, digest: str, citation: str) -> None:
        super().__init__(facts, probabilities.clamp(min=SMALLEST_PROBABILITY).log()[None], [(0, 0, digest)], citation)
        self.probabilities = probabilities

    def _select(self, positions: list[int]) -> Predictions:
        return self

    def __repr__(self) -> str:
        _, inputs, classes = self.shape
        return f"PosteriorMean({self.facts.collection!r}, {inputs:,} inputs × {classes} classes, on {self.facts.data})"


def describe(collection: str, data: ImageData, classes: tuple[str, ...], dtype: str) -> SetDescription:
    """Return the description of predictions in memory on images whose labels are in the order of the classes."""
    labels = None if data.labels is None or data.classes != classes else tuple(data.labels.tolist())
    return SetDescription(
        collection, f"{data.name}-{data.split}", data.name, data.split, data.revision, data.fingerprint, len(data),
        classes, {}, dtype, "", "", "", {}, labels,
    )  # fmt: skip


def predictions_from_probabilities(file: str | Path, *, data: ImageInput, citation: str = "") -> PosteriorMean:
    """Read the mean probabilities of a posterior, a row for each image; return them as predictions without members.

    `zoo.compare_predictives` compares them with members or with another mean, and `zoo.evaluate` measures them; figures
    of diversity are not defined, because a mean has no members.

    Args:
        file: a `.npy` file, or a text file of numbers (`.csv`, `.txt`) with commas or spaces, on this machine or at an
            https:// or gs:// address; its axes are (input, class).
        data: the images, in the order of the rows; their classes are the order of the columns.
        citation: text by which the authors want to be cited; "" for the name and hash of the file.

    Raises:
        UsageError: the images have no classes, or the rows or columns are not as many as images and classes.
        FormatError: the file has other values than probabilities that sum to 1.
        SourceNotFound, AccessError, NetworkError: the file can't be read.

    >>> import tempfile, numpy as np, checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=8)
    >>> path = tempfile.mkdtemp() + "/mean.npy"
    >>> np.save(path, members.ensemble().predict_proba(members.preprocess(zoo.images.of("digits").images)))
    >>> mean = zoo.predictions_from_probabilities(path, data="digits")
    >>> zoo.compare_predictives(members, mean, "digits")["agreement"].value
    1.0
    """
    subject = f"probabilities {file}"
    content = _read_file(str(file), subject)
    data = images.of(data)
    if not data.classes:
        raise UsageError(
            f"images {data.name!r}", expected="classes in the order of the columns", found="none",
            do="Name them: `zoo.images.of(…, classes=…)`",
        )  # fmt: skip
    values = _parse(content, subject)
    _check_shape(values, data, subject)
    _check_probabilities(values, subject)
    probabilities = torch.from_numpy(values / values.sum(1, keepdims=True))
    digest = hashlib.sha256(content).hexdigest()
    mean = PosteriorMean(
        describe(Path(str(file)).stem, data, data.classes, "float64"), probabilities, digest,
        citation or f"{Path(str(file)).name}, sha256 {digest[:16]}",
    )  # fmt: skip
    if data.labels is not None:
        accuracy = float((probabilities.argmax(1) == data.labels).double().mean())
        if len(data) > 99 and accuracy < SUSPICIOUS_ACCURACY / len(data.classes):
            warnings.warn(
                f"{subject}: the accuracy on {data.name}/{data.split} is {accuracy:.1%}, about chance. Are the rows in "
                "the order of these images, and the columns in the order of their classes?",
                stacklevel=2,
            )
    return mean


def _read_file(file: str, subject: str) -> bytes:
    if web.is_web_address(file):
        return web.WebFile.of(web.https_address(file), subject).read_whole()
    path = Path(file).expanduser()
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise SourceNotFound(subject, expected="a file of probabilities, .npy or .csv", found=found, path=path)
    if path.stat().st_size > LARGEST_FILE_NBYTES:
        expected, found = (format_bytes(n) for n in (LARGEST_FILE_NBYTES, path.stat().st_size))
        raise FormatError(subject, expected=f"at most {expected}", found=found, path=path)
    return path.read_bytes()


def _parse(content: bytes, subject: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Read numbers from a file of numpy or from text; return them as float64."""
    try:
        if content.startswith(b"\x93NUMPY"):
            values = np.load(io.BytesIO(content), allow_pickle=False)
        else:
            text = content.decode("utf-8-sig")
            values = np.loadtxt(io.StringIO(text), delimiter="," if "," in text[:10_000] else None, ndmin=2)
    except (ValueError, EOFError, OSError) as error:
        raise FormatError(
            subject, expected="numbers, in a .npy file or as text with commas or spaces", found=str(error)[:200],
            do="Leave out headers and names",
        ) from error  # fmt: skip
    if values.dtype.kind not in "fiu":
        raise FormatError(subject, expected="numbers", found=f"an array of {values.dtype}")
    numbers: np.ndarray[Any, np.dtype[np.float64]] = values.astype(np.float64)
    return numbers


def _check_shape(values: np.ndarray[Any, Any], data: ImageData, subject: str) -> None:
    wanted = len(data), len(data.classes)
    if values.shape == wanted:
        return
    advice = ""
    if values.ndim == 3:
        advice = "Average over the members first, or make a collection of the members"
    elif values.ndim == 2 and values.shape[1] == wanted[1] + 1:
        advice = "If the first column numbers the rows, leave it out"
    elif values.ndim == 2 and values.shape[0] != wanted[0]:
        advice = f"Give the images of the rows as `data`, in their order; {data.name}/{data.split} has {wanted[0]:,}"
    raise UsageError(
        subject,
        expected=f"{wanted[0]:,} rows, one for each image of {data.name}/{data.split}, and "
        f"{count_with_noun(wanted[1], 'column')}, one for each class",
        found=" × ".join(f"{n:,}" for n in values.shape) or "one number",
        do=advice,
    )


def _check_probabilities(values: np.ndarray[Any, Any], subject: str) -> None:
    is_finite = np.isfinite(values)
    if not is_finite.all():
        row, column = np.argwhere(~is_finite)[0]
        found = f"{values[row, column]} in row {row + 1}, column {column + 1}"
        raise FormatError(subject, expected="finite probabilities", found=found + _more((~is_finite).sum() - 1))
    is_outside = (values < 0) | (values > 1 + SUM_TOLERANCE)
    if is_outside.any():
        row, column = np.argwhere(is_outside)[0]
        raise FormatError(
            subject, expected="probabilities from 0 to 1",
            found=f"{values[row, column]:.6g} in row {row + 1}, column {column + 1}",
            do="If these are logits or logarithms, take their softmax first",
        )  # fmt: skip
    sums = values.sum(1)
    is_off = np.abs(sums - 1) > SUM_TOLERANCE
    if is_off.any():
        row = int(np.argmax(is_off))
        raise FormatError(
            subject, expected=f"rows that sum to 1 (± {SUM_TOLERANCE:g})",
            found=f"{sums[row]:.6g} in row {row + 1}{_more(is_off.sum() - 1)}",
            do="Give all classes, and divide by the sums if they are counts",
        )  # fmt: skip


def _more(count: int) -> str:
    return f", and {count:,} more" if count else ""
