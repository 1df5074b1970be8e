"""The page on image data: its tables come from the package."""

from __future__ import annotations

from checkpoints_zoo.images import CLASSES
from checkpoints_zoo.images.data_sets import DIGITS_TEST_COUNT, HUB_SETS, HubSet
from checkpoints_zoo.images.image_data import OTHER_SPELLINGS

LINE = 116

# Where the order of each set's labels comes from.
SOURCES = {
    "digits": "`sklearn.datasets.load_digits().target_names`",
    "mnist": "the label files of the authors (train-labels-idx1-ubyte): a label is the digit",
    "fashion-mnist": "the table of labels in zalandoresearch/fashion-mnist, as in torchvision's `FashionMNIST.classes`",
    "cifar10": "`label_names` in the authors' `batches.meta`",
    "cifar100": "`fine_label_names` in the authors' `meta`; the alphabet's order",
    "tiny-imagenet": "the lines of the authors' `wnids.txt`, which torch-uncertainty follows; not the sorted order of"
    " torchvision's ImageFolder",
    "svhn": "the repo's: a label is the digit (in the authors' .mat files the digit 0 has the label 10)",
}

START = """\
# Image data

Made by `python -m docs.make`; a test compares the two and runs the code.

`zoo.evaluate`, `zoo.pairwise`, `members.predict`, `members.predictions(data=)`, `zoo.barrier`, `zoo.compact` and
`zoo.verify` take images by name, from a place, or as you have them in memory. All of it goes through
one function, `zoo.images.of`, which has the options. Images are uint8 pixels (input, channel, height, width); members
preprocess them as their description says.

## By name

| name | where | test | train | pixels | classes |
|---|---|---|---|---|---|
"""

SPLITS = """\
Tiny-ImageNet's test set is its validation set, since its own has no labels. `zoo.images.load(name, split)` reads one
split: its files alone, once, through the Hub's cache.
"""

KINDS = """\
## Your own

The examples make a few small files first:

```python
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import checkpoints_zoo as zoo

members = zoo.load("convnet-digits", n=4)
digits = zoo.images.load("digits")
for at, (image, label) in enumerate(zip(digits.images[:100], digits.labels[:100])):
    file = Path(f"mine/{int(label)}/{at:03}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[0].numpy()).save(file)
```

### What a text means

1. `hf://datasets/ORG/NAME[@REVISION][/PATH]` is a data set on the Hub.
2. `digits` or `digits/train` is a data set by name. Names win: `./digits` is a folder.
3. A text that contains a slash, or names a file or folder that exists, is a path. Any other text is refused.

On the command line `--data` and `--ood` follow the same rules: `zoo-cli evaluate convnet-digits --data mine --ood
photos`.

### A folder of images

A folder with one folder of PNG or JPEG images for each class, as torchvision's ImageFolder reads it: the classes are
the sorted folder names. A folder of images without class folders has no labels; it serves out of distribution. If all
folders are called `train`, `test`, `val` or similar, they are splits: `split=` chooses one, by default "test".

```python
zoo.evaluate(members, "mine", ood="photos")
```

### Parquet, and data sets on the Hub

A file, a folder of files, or an address; columns as the package `datasets` writes them: one of encoded images, one
of labels, their kinds and the names of the classes in the file's metadata. Where several columns could be meant, or
the file says nothing, `image=`, `label=` and `classes=` do. Labels may be names too. Images are turned as their
EXIF orientation says. File names tell the split, as on the Hub (`test-00000-of-00002.parquet`, `test.parquet`,
`test/0000.parquet`); a split with a missing file is refused.

```python
import datasets

columns = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(digits.classes))})
pictures = [Image.fromarray(image[0].numpy()) for image in digits.images[:50]]
rows = {"image": pictures, "label": digits.labels[:50].tolist()}
datasets.Dataset.from_dict(rows, features=columns).to_parquet("fifty.parquet")
zoo.evaluate(members, "fifty.parquet")
```

A repo is read through the Hub's client: the files of one split, once. `hf://datasets/ORG/NAME/PATH` names a folder
or a file in it; a data set that has no Parquet files of its own is refused.

### Tensors, Datasets, DataLoaders

`zoo.images.of` takes uint8 tensors or arrays, a tuple (images, labels), and whatever gives images or (image,
label), one by one or in batches: a Dataset with tensors or with Pillow's images, a DataLoader, a set of the package
`datasets`, an iterator. Names of classes come from the Dataset (`classes`, or `features`) if it has them.

```python
loader = DataLoader(TensorDataset(digits.images, digits.labels), batch_size=64)
data = zoo.images.of(loader, classes=digits.classes)  # a TensorDataset does not name its classes
zoo.evaluate(members, data)
zoo.images.of(np.zeros((2, 8, 8, 1), np.uint8), channels_last=True)
```

A loader that shuffles gives other fingerprints each time: predictions that were stored on one order are refused for
another. Everything is held in memory, as uint8: CIFAR's test set takes 31 MB, 50,000 images of 224 x 224 take 7.5
GB. Images that do not fit into memory are refused before they are read, if their number is known.

### Inputs that are preprocessed already

`of` refuses floats, because pixels in 0..1 and normalised pixels look alike. `prepared` takes inputs whose transforms
end in the collection's Normalize:

```python
inputs = members.preprocess(digits.images)  # or from your transforms: float32, used unchanged
prepared = zoo.images.prepared((inputs, digits.labels), classes=digits.classes)
zoo.evaluate(members, prepared)
```

Their fingerprint is over the float32 values, so that predictions stored on pixels are not those on them.

### Another size, other channels

Members take one size. Images of another one are refused, unless you say so: `size=(height, width)` resizes each
with Pillow, bilinearly, the filter as wide as a reduction needs (the pixels are those of torchvision's Resize on
Pillow's images); `channels=3` makes grey images three equal channels, `channels=1` coloured ones grey (ITU-R 601
luma). A few grey images among coloured ones always become three equal channels. A set by name gets another name
with it.

```python
zoo.images.of("digits", size=(32, 32), channels=3).name  # digits-3x32x32
```

## The order of classes

Labels are numbers; what they mean is told by the names of the classes. Images whose classes are the members' in
another order are put into the members' order, and all figures, fingerprints and stored predictions are those of the
images in that order. Some of the classes are enough. Names are the same if they differ only in capitals, spaces,
hyphens and underscores ("Pickup truck" is `pickup_truck`), as long as no two are alike then; and these spellings of
others are known:

SPELLINGS

Other names are refused, by name. Say what they mean with `renamed=`:

```python
words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
data = zoo.images.of((digits.images, digits.labels), classes=words)
zoo.evaluate(members, zoo.images.of(data, renamed=dict(zip(words, digits.classes))))
```

Labels without any names are refused as well; `classes=members.classes` says that they are in the members' order. A
label -1 in every row is none.

## What is refused

A damaged image, a web page or a Git LFS pointer in its place, an image of another size than the others, a transparent
one, one of 16 bits a channel, one of more than 67,108,864 pixels; the error names the file, or the row of the Parquet
file. An empty folder or data set. A class folder without images. Labels beyond the classes. Arrays whose channels are
at the other end than `channels_last` says. Names of your own (`name=`) are lower-case and not those of
a set by name, so that no claim about "cifar10/test" is about other images.

`zoo.verify` measures claimed accuracies again on sets by name; those on images of your own if you give them, under
the name that the manifest has: `zoo.verify(members, data=zoo.images.of("mine", name="mine"))`.
"""


def _where(hub_set: HubSet) -> str:
    files = ", ".join(f"`{hub_set.folder}/{split}-*`" for split in hub_set.splits.values())
    return f"`{hub_set.repo}`, {files}; columns `{hub_set.image}`, `{hub_set.label}`"


def sets() -> str:
    """Return the rows of the table of sets by name."""
    train = 1797 - DIGITS_TEST_COUNT
    rows: list[tuple[str, ...]] = [
        ("digits", "in scikit-learn: `load_digits`", f"{DIGITS_TEST_COUNT:,}", f"{train:,}", "1 x 8 x 8", "10"),
        ("photos", "in scikit-learn: patches of `load_sample_images`", "2,000", "", "1 x 8 x 8", "none"),
    ]
    for each in HUB_SETS.values():
        size = " x ".join(map(str, (each.channels, *each.size)))
        counts = [f"{each.inputs[split]:,}" for split in ("test", "train")]
        rows.append((each.name, _where(each), *counts, size, str(len(each.classes))))
    return "".join(f"| `{name}` | {' | '.join(cells)} |\n" for name, *cells in rows)


def classes() -> str:
    """Return the names of the classes of each set, in the order of the labels, with their source."""
    lines = ["## Labels", "", "Class names in the order of the labels, from 0 on.", ""]
    for name, known in CLASSES.items():
        lines += [f"**{name}** ({len(known)}). From {SOURCES[name]}."]
        if name in HUB_SETS and HUB_SETS[name].names_sorted:
            lines[-1] += " The repo numbers the sorted names; they are put into this order when read."
        lines += ["", "```", *_wrapped(known), "```", ""]
        spelled = HUB_SETS[name].repo_class_names if name in HUB_SETS else {}
        if spelled:
            what = ", ".join(f"`{theirs}` for `{ours}`" for ours, theirs in spelled.items())
            lines += [f"The repo's names that differ: {what}.", ""]
    return "\n".join(lines)


def _wrapped(names: tuple[str, ...]) -> list[str]:
    lines = [""]
    for name in names:
        word = f"{name}, " if name != names[-1] else name
        if len(lines[-1]) + len(word) > LINE:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def spellings() -> str:
    """Return the other spellings that are known."""
    return ", ".join(f'"{theirs}" is `{ours}`' for theirs, ours in OTHER_SPELLINGS.items()) + "."


def page() -> str:
    """Write the page; return the text of docs/data.md."""
    return f"{START}{sets()}\n{SPLITS}\n{classes()}\n{KINDS.replace('SPELLINGS', spellings())}"
