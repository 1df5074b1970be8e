"""Augmentation on the device: shifts and flips of images, drawn from the member's seed in each epoch.

An augmentation is a finite set of views of an image, and a whole number selects one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """A set of views of an image: shifted, and possibly mirrored.

    Args:
        padding: largest shift in pixels, in each direction; uncovered pixels are black (0).
        flip: whether half of the views are mirrored left to right.
    """

    padding: int = 0
    flip: bool = False

    @property
    def view_count(self) -> int:
        """Return the number of views; all are equally likely."""
        return (2 * self.padding + 1) ** 2 * (2 if self.flip else 1)

    def offsets(self, view_numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decode numbers of views; return the first row and first column of each crop, and whether it is flipped,
        (input,).

        Args:
            view_numbers: number of the view of each image, in [0, view_count), (input,).

        >>> Augmentation(padding=1).offsets(torch.tensor([0, 4, 5]))[:2]
        (tensor([0, 1, 1]), tensor([0, 1, 2]))
        """
        positions_per_axis = 2 * self.padding + 1
        return (
            view_numbers // positions_per_axis % positions_per_axis,
            view_numbers % positions_per_axis,
            view_numbers >= positions_per_axis * positions_per_axis,
        )

    def __call__(self, images: Tensor, view_numbers: Tensor) -> Tensor:
        """Take one view of each image; return the pixels in the same shape and dtype.

        The image is padded with black, cropped and then flipped, as by torchvision's RandomCrop(size, padding) and
        RandomHorizontalFlip.

        Args:
            images: pixels, (input, channel, height, width).
            view_numbers: number of the view of each image, in [0, view_count), on the images' device, (input,).

        >>> Augmentation(flip=True)(torch.tensor([[[[1, 2, 3]]]]), torch.tensor([1]))
        tensor([[[[3, 2, 1]]]])
        """
        if self.view_count == 1:
            return images
        image_count, channels, height, width = images.shape
        first_rows, first_columns, is_flipped = self.offsets(view_numbers)
        column_numbers = torch.arange(width, device=images.device)
        rows = first_rows[:, None] + torch.arange(height, device=images.device)
        columns = first_columns[:, None] + torch.where(is_flipped[:, None], width - 1 - column_numbers, column_numbers)
        padded = F.pad(images, (self.padding,) * 4)
        return padded[
            torch.arange(image_count, device=images.device)[:, None, None, None],
            torch.arange(channels, device=images.device)[:, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(),
    "shift1": Augmentation(padding=1),
    "crop4": Augmentation(padding=4),
    "crop4-flip": Augmentation(padding=4, flip=True),
}
