"""A small vision transformer for square images; its parameters have the names and the layout of timm's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import UsageError


class Attention(nn.Module):
    """Attention of all tokens to all tokens; one layer computes the queries, keys and values of all heads, in this
    order, as in timm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # (batch, head, 3, token, unit)
        queries, keys, values = heads.unbind(2)
        weights = (self.scale * queries @ keys.mT).softmax(-1)  # (batch, head, query, key)
        attended: Tensor = self.proj((weights @ values).transpose(1, 2).flatten(2))
        return attended


class MLP(nn.Module):
    """Two linear layers with GELU between them, on each token alone."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        features: Tensor = self.fc2(self.act(self.fc1(tokens)))
        return features


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input (Vaswani et al. 2017; pre-norm: Xiong et al.
    2020)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    """A linear map of each patch of an image to a token."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


class ViT(nn.Module):
    """Tokens of patches and a class token, blocks, and a linear layer on the class token (Dosovitskiy et al. 2021).

    Axes: images (batch, channel, height, width), tokens (batch, token, unit), logits (batch, class).
    """

    def __init__(
        self, size: int, patch: int, width: int, depth: int, heads: int, hidden: int, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(channels, patch, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images)
        class_token = self.cls_token.expand(patches.shape[0], -1, -1)
        tokens = torch.cat([class_token, patches], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


def vit(
    channels: int = 1,
    size: int = 8,
    patch: int = 2,
    width: int = 32,
    depth: int = 2,
    heads: int = 4,
    hidden: int = 64,
    classes: int = 10,
) -> nn.Module:
    """Build a vision transformer for square images, and return it with its random initial parameters.

    Args:
        channels: number of channels of the images.
        size: height and width of the images in pixels.
        patch: height and width of a patch in pixels.
        width: number of units of a token.
        depth: number of blocks.
        heads: number of heads of each block; each has `width` / `heads` units.
        hidden: number of hidden units of the MLP in each block.
        classes: number of classes.

    Raises:
        UsageError: the patches do not fill the images, or the heads do not share the units evenly.

    >>> sum(p.numel() for p in vit().parameters())
    18218
    """
    for name, part, whole_name, whole in (("patch", patch, "size", size), ("heads", heads, "width", width)):
        if part < 1 or whole % part:
            raise UsageError(
                f"argument {name!r} of architecture 'vit'",
                expected=f"a divisor of {whole_name} = {whole}",
                found=str(part),
            )
    return ViT(size, patch, width, depth, heads, hidden, channels, classes)
