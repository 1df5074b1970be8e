"""Small networks for symmetries, each with one thing that a table can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints_zoo.networks.architectures import IMAGE_SHAPES
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.symmetry import Table, symmetries


class Shaped(nn.Module):
    """A module whose forward is a function of itself."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = forward

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


def conv(channels: int, width: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, padding=size // 2, **options)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1), nn.LeakyReLU(0.2), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def functional() -> nn.Module:
    """Activations as functions, methods and in place; the kernel as an argument; a scalar and a matrix product."""

    def forward(net: Any, x: Tensor) -> Any:
        x = F.relu_(F.linear(x, net.first.weight, net.first.bias))
        x = torch.relu(2.0 * (x @ net.second) / 3).clamp_(min=0)
        x = torch.relu_(net.third(-x)) * 0.5
        return net.last(F.dropout(x.relu_(), 0.5, net.training))

    return Shaped(
        forward, first=nn.Linear(4, 6), second=nn.Parameter(torch.randn(6, 5)), third=nn.Linear(5, 3),
        last=nn.Linear(3, 2),
    )  # fmt: skip


def flattened() -> nn.Module:
    """Two maps flattened by view and Flatten, a norm over the entries of the flattened map."""

    def forward(net: Any, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(net.conv(x)), 2)
        x = F.relu(net.norm(x.view(x.size(0), -1)))
        return net.last(F.relu(net.middle(x)))

    return Shaped(forward, conv=conv(2, 3), norm=nn.BatchNorm1d(12), middle=nn.Linear(12, 4), last=nn.Linear(4, 2))


def shared() -> nn.Module:
    """One tensor in two layers, one layer called twice, and an output kernel tied to the first one."""

    def forward(net: Any, x: Tensor) -> Any:
        x = F.leaky_relu(net.first(x))
        for layer in (net.one, net.two, net.twice, net.twice):
            x = F.leaky_relu(layer(x))
        return F.linear(x, net.first.weight.t())

    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    two.weight = one.weight
    return Shaped(forward, first=nn.Linear(3, 6), one=one, two=two, twice=nn.Linear(6, 6))


def grouped() -> nn.Module:
    """Grouped kernels behind and before free ones, with more than one input a group; depthwise, with two rows each."""
    return nn.Sequential(
        conv(2, 8), nn.ReLU(), conv(8, 12, groups=4), nn.ReLU(), conv(12, 8, groups=2), nn.BatchNorm2d(8), nn.ReLU(),
        conv(8, 6, 1), nn.ReLU(), conv(6, 12, groups=6), nn.ReLU(), conv(12, 12, groups=12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def grouped_input() -> nn.Module:
    return nn.Sequential(
        conv(2, 6, groups=2), nn.ReLU(), conv(6, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def residual(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """A pre-activation residual network: the stream is read by norms."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.stem(x)
        x = x + net.conv2(F.relu(net.norm2(net.conv1(F.relu(net.norm1(x))))))
        x += net.conv4(F.relu(net.conv3(F.relu(net.norm3(x)))))
        return net.last(F.relu(net.norm4(x)).mean((2, 3)))

    return Shaped(
        forward, stem=conv(2, 6), norm1=norm(6), conv1=conv(6, 5), norm2=norm(5), conv2=conv(5, 6), norm3=norm(6),
        conv3=conv(6, 4), conv4=conv(4, 6), norm4=norm(6), last=nn.Linear(6, 3),
    )  # fmt: skip


def group_normed() -> nn.Module:
    return nn.Sequential(
        conv(2, 12), nn.GroupNorm(3, 12), nn.ReLU(), conv(12, 12), nn.GroupNorm(6, 12), nn.ReLU(),
        conv(12, 12, groups=3), nn.GroupNorm(1, 12), nn.ReLU(), conv(12, 4), nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def layer_normed() -> nn.Module:
    """A ConvNeXt block: channels last, a norm over channels, a gain on the branch."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.stem(x)
        y = net.depthwise(x).permute(0, 2, 3, 1)
        y = net.contract(F.gelu(net.expand(net.norm(y)))) * net.gain
        x = x + y.permute(0, 3, 1, 2)
        return net.last(x.mean([-2, -1]))

    return Shaped(
        forward, stem=conv(2, 6), depthwise=conv(6, 6, groups=6), norm=nn.LayerNorm(6), expand=nn.Linear(6, 8),
        contract=nn.Linear(8, 6), gain=nn.Parameter(torch.randn(6)), last=nn.Linear(6, 3),
    )  # fmt: skip


def gated() -> nn.Module:
    """Squeeze and excitation, then a product of two streams that both scale, and a square."""

    def forward(net: Any, x: Tensor) -> Any:
        x = F.relu(net.bn(net.conv1(x)))
        gate = net.excite(F.silu(net.squeeze(x.mean((2, 3), keepdim=True))))
        x = x * torch.sigmoid(gate)
        x = F.relu(net.left(x)) * net.right(x)
        a, b = net.both(x).chunk(2, dim=1)
        x = a * b.relu() + net.third(x).square()
        return net.last(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))

    return Shaped(
        forward, conv1=conv(2, 6, bias=False), bn=nn.BatchNorm2d(6), squeeze=conv(6, 2, 1), excite=conv(2, 6, 1),
        left=conv(6, 5), right=conv(6, 5), both=conv(5, 8, 1), third=conv(5, 4, 1), last=nn.Linear(4, 3),
    )  # fmt: skip


def dense() -> nn.Module:
    """Two dense blocks' layers: what was computed so far side by side, behind a norm; zeros beside a shortcut."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.stem(x)
        for norm, layer in ((net.norm1, net.conv1), (net.norm2, net.conv2)):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        x = F.relu(net.norm3(x))
        y = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2)) + net.wide(F.avg_pool2d(x, 2))
        return net.last(F.relu(y).amax((2, 3)))

    return Shaped(
        forward, stem=conv(2, 4), norm1=nn.BatchNorm2d(4), conv1=conv(4, 3), norm2=nn.BatchNorm2d(7), conv2=conv(7, 3),
        norm3=nn.BatchNorm2d(10), wide=conv(10, 13, bias=False), last=nn.Linear(13, 3),
    )  # fmt: skip


def mixer() -> nn.Module:
    """Patches mixed along both axes, as in MLP-Mixer."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.patch(x).flatten(2).transpose(1, 2)
        x = x + net.tokens2(F.relu(net.tokens1(net.norm1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + net.channels2(F.relu(net.channels1(net.norm2(x))))
        return net.last(x.mean(1))

    return Shaped(
        forward, patch=nn.Conv2d(2, 6, 2, 2), norm1=nn.LayerNorm(6), tokens1=nn.Linear(4, 5), tokens2=nn.Linear(5, 4),
        norm2=nn.LayerNorm(6), channels1=nn.Linear(6, 7), channels2=nn.Linear(7, 6), last=nn.Linear(6, 3),
    )  # fmt: skip


def upsampled() -> nn.Module:
    """A kernel (in, out, ...), a resized map, slopes of their own, several outputs of several sizes."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.act(net.conv(x))
        y = F.interpolate(net.up(x).relu(), scale_factor=2)
        return {"map": net.head(y), "class": net.last(torch.flatten(x, 1))}

    return Shaped(
        forward, conv=conv(2, 4), act=nn.PReLU(4), up=nn.ConvTranspose2d(4, 5, 2, 2), head=conv(5, 2, 1),
        last=nn.Linear(64, 3),
    )  # fmt: skip


class OwnConv(nn.Conv2d):
    """A layer of a user's own, which computes with torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=1, groups=self.groups)


class OwnNorm(nn.BatchNorm2d):
    """A norm that only has another name."""


def owned() -> nn.Module:
    """Layers of a user's own: subclasses, norms as functions, a buffer in the sum."""

    def forward(net: Any, x: Tensor) -> Any:
        x = F.relu(net.norm1(net.conv1((x - net.mean) / 2)))
        norm = net.norm2
        x = F.batch_norm(
            net.conv2(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
        x = F.group_norm(net.conv3(F.hardtanh(x)), 2, net.norm3.weight, net.norm3.bias, eps=net.norm3.eps)
        x = F.adaptive_avg_pool2d(torch.add(input=x, other=net.offset.view(1, -1, 1, 1)).abs(), (1, 1)).squeeze(-1)
        return net.last(torch.transpose(x, 1, 2).squeeze(1))

    net = Shaped(
        forward, conv1=OwnConv(2, 4, 3), norm1=OwnNorm(4), conv2=OwnConv(4, 6, 3, groups=2), norm2=nn.BatchNorm2d(6),
        conv3=conv(6, 4), norm3=nn.GroupNorm(2, 4), offset=nn.Parameter(torch.randn(4)), last=nn.Linear(4, 3),
    )  # fmt: skip
    net.register_buffer("mean", torch.randn(2, 1, 1))
    return net


# Name -> (build, shape of one input).
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)), "functional": (functional, (4,)), "flattened": (flattened, (2, 4, 4)), "shared": (shared, (3,)),
    "grouped": (grouped, (2, 4, 4)), "grouped_input": (grouped_input, (2, 4, 4)), "residual": (residual, (2, 4, 4)),
    "group_normed": (group_normed, (2, 4, 4)), "layer_normed": (layer_normed, (2, 4, 4)), "gated": (gated, (2, 4, 4)),
    "residual_group_normed": (lambda: residual(lambda n: nn.GroupNorm(1, n)), (2, 4, 4)), "dense": (dense, (2, 4, 4)),
    "mixer": (mixer, (2, 4, 4)), "upsampled": (upsampled, (2, 4, 4)),
    "owned": (owned, (2, 4, 4)),
}  # fmt: skip


def architecture(name: str, **arguments: Any) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    return lambda: build_architecture(name, **arguments), IMAGE_SHAPES[name]


EVERY = NETS | {
    "convnet": architecture("convnet"), "resnet8": architecture("resnet8"), "optunet": architecture("optunet"),
    "optunet-355": architecture("optunet", hidden=3), "resnet20": architecture("resnet20-frn-silu"),
    "resnet20-bias": architecture("resnet20-frn-silu", conv_bias=True), "perceptron": architecture("mlp"),
}  # fmt: skip


@cache
def table_of(name: str) -> Table:
    """Derive the table of a net of `EVERY`, once."""
    build, shape = EVERY[name]
    return symmetries(build(), torch.zeros(2, *shape))


def randomised(net: nn.Module, seed: int) -> nn.Module:
    """Draw all parameters and statistics in float64; gains are of both signs, some of them zero; return the net."""
    generator = torch.Generator().manual_seed(seed)
    net.double().eval()
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if not tensor.is_floating_point():
                continue
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if name.endswith("running_var"):
                drawn = drawn.square() + 0.2
            elif tensor.ndim == 1 and len(tensor) > 2 and name.endswith("weight"):
                drawn[torch.randint(len(tensor), (1,), generator=generator)] = 0
            elif tensor.ndim > 1:
                drawn /= tensor[0].numel() ** 0.5
            tensor.copy_(drawn)
    return net


def without_eps(net: nn.Module, eps: float = 0.0) -> nn.Module:
    """Set eps of all norms without running statistics to zero, or to a very small number; return the net."""
    for layer in net.modules():
        if hasattr(layer, "eps") and getattr(layer, "running_var", None) is None:
            vars(layer)["eps"] = eps
    return net
