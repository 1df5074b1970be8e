"""The posterior that all methods approximate: a recipe's network, its training images, a Gaussian prior.

Training minimises the mean cross-entropy plus weight_decay/2 · |θ|². Multiplied by the number N of images, this loss is
minus the log of the likelihood times an iid Gaussian prior of precision N · weight_decay, as in Laurent, Aldea &
Franchi 2024. If a recipe smooths labels, its modes are trained with smoothed labels, but the likelihood is that of
the labels themselves. AdamW shrinks the weights apart from the loss, so its modes are minima of another function; the
prior has the same precision.

Axes: stacked tensors are (run, *shape), inputs (input, channel, height, width).

This is one file, because it is one class.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.methods.modes import (
    Tensors,
    find_random_buffer,
    gpu_name,
    read_modes,
    tied_names,
    train_modes,
)
from checkpoints_zoo.populations.statistics import has_statistics, reestimate_statistics
from checkpoints_zoo.training.augment import AUGMENTATIONS
from checkpoints_zoo.training.loop import StackState
from checkpoints_zoo.training.optimizers import first_scaling
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.seeds import derive_seed, seeded_generator

FORWARD_BATCH = 500  # Number of inputs in a forward pass.


@dataclass(frozen=True, eq=False)
class Problem:
    """A recipe's network given its training images.

    Args:
        recipe: recipe of the network; training by the recipe gives the modes.
        images: the training images, labelled.
        held_out: images for a search of settings, which are not in `images`; None if there are none.
        folder: folder where trained modes are stored for other methods; None to store none.
        device: device to compute on.
    """

    recipe: Recipe
    images: ImageData
    held_out: ImageData | None = None
    folder: Path | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it can't be changed)
    _trained_modes: dict[int, Tensors] = field(
        default_factory=dict, init=False, repr=False
    )  # Number of runs -> their modes.

    def __post_init__(self) -> None:
        self._functional, self._random_buffer  # noqa: B018 (built now: random initialisation can't be mapped by torch.vmap)

    @classmethod
    def of(
        cls, recipe: Recipe, *, held_out: int = 0, folder: Path | None = None, device: str | torch.device = "cpu"
    ) -> Problem:
        """Make the problem of a recipe on the recipe's training images, without the last `held_out` images; return the
        problem.

        Args:
            recipe: recipe of the network.
            held_out: number of training images that are held out.
            folder: folder where trained modes are stored.
            device: device to compute on.

        Raises:
            UsageError: the recipe has no weight decay and so no prior, or varied fields and so no single posterior; or
                too many images are held out.
        """
        if recipe.varied:
            raise UsageError(
                f"varied of recipe {recipe.name!r}",
                expected="no varied fields: a posterior has one prior for all members",
                found=", ".join(recipe.varied),
                do="Take the recipe of one member: recipe.of_member(0)",
            )
        if not recipe.weight_decay > 0:
            raise UsageError(
                f"weight_decay of recipe {recipe.name!r}",
                expected="more than 0: it is the prior of the posterior",
                found=f"{recipe.weight_decay:g}",
            )
        images = recipe.split("train")
        remaining_count = len(images) - held_out
        if held_out < 0 or remaining_count < recipe.batch_size:
            raise UsageError(
                f"images held out of {images.name!r}",
                expected=f"0 to {len(images) - recipe.batch_size:,}: a batch has to be left",
                found=f"{held_out:,}",
            )
        held_out_images = _select_images(images, slice(remaining_count, None)) if held_out else None
        return cls(
            recipe, _select_images(images, slice(0, remaining_count)), held_out_images, folder, torch.device(device)
        )

    @property
    def count(self) -> int:
        """N, the number of training images."""
        return len(self.images)

    @property
    def prior_precision(self) -> float:
        """Precision of the iid Gaussian prior over all parameters: N · weight_decay."""
        return self.count * self.recipe.weight_decay

    @cached_property
    def inputs(self) -> Tensor:
        """The training images, preprocessed, without augmentation, float32."""
        return self.recipe.preprocess(self.images.images).to(self.device)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the training images, (input,)."""
        if self.images.labels is None:
            raise UsageError(f"data set {self.images.name!r}", expected="labels", found="none")
        return self.images.labels.to(self.device)

    def network(self) -> nn.Module:
        """Build the network in training mode; return the network. The state of torch's generator does not change."""
        return self.recipe.skeleton()

    @cached_property
    def has_norms(self) -> bool:
        """Whether the network normalises by batch statistics, so that logits depend on the other inputs of a batch."""
        return has_statistics(self.network())

    @cached_property
    def _functional(self) -> nn.Module:
        module = self.network().to(self.device)
        for norm in (layer for layer in module.modules() if isinstance(layer, _BatchNorm)):
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
            norm.track_running_stats = False  # The norm always uses batch statistics and stores none.
        return module.requires_grad_(False)

    @cached_property
    def _random_buffer(self) -> str:
        return find_random_buffer(self.recipe.module, self.device)

    def _check_buffers(self) -> None:
        if self._random_buffer:
            raise UsageError(
                f"buffer {self._random_buffer!r} of architecture {self.recipe.architecture!r}",
                expected="the same values whenever the network is built: draws are of the parameters alone",
                found="others each time",
                do="Build it from a seed of its own, or make it a parameter",
            )

    def forward(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Run one network; return logits (batch, class). Norms use batch statistics; the function works under
        torch.func.

        Args:
            params: parameters by name.
            inputs: preprocessed images, (batch, channel, height, width).

        Raises:
            UsageError: some buffers are random when the network is built.
        """
        self._check_buffers()
        logits: Tensor = functional_call(self._functional, dict(params), (inputs,))
        return logits

    def log_prior(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return log p(params) in nats, including the constant."""
        parameter_count = sum(p.numel() for p in params.values())
        squared_norm = torch.stack([p.square().sum() for p in params.values()]).sum()
        return -self.prior_precision / 2 * squared_norm + parameter_count / 2 * math.log(
            self.prior_precision / (2 * math.pi)
        )

    def log_posterior(self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Estimate log p(params, all labels | all inputs) from a batch; return the estimate in nats, and the batch's
        logits.

        The log likelihood of the batch is multiplied by N / batch: unbiased if all images are equally probable.

        Args:
            params: parameters of one network by name.
            batch: inputs and labels.
        """
        inputs, labels = batch
        logits = self.forward(params, inputs)
        log_likelihood = -F.cross_entropy(logits, labels, reduction="sum")
        return self.count / len(labels) * log_likelihood + self.log_prior(params), logits

    def batches(self, batch_size: int, seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end, each run in its own order: inputs (run, batch, …) and labels (run, batch).

        Every run sees all images once an epoch, augmented as in the recipe; an incomplete last batch is skipped.

        Args:
            batch_size: number of images of a batch; batches are never larger than the data set.
            seeds: seed of the order of images in each run.
        """
        augmentation, normalise = AUGMENTATIONS[self.recipe.augmentation], self.recipe.preprocess.on(self.device)
        pixels, labels, epoch = self.images.images.to(self.device), self.labels, 0
        batch_size = min(batch_size, self.count)
        while True:
            generators = [seeded_generator(derive_seed(seed, f"batches {epoch}")) for seed in seeds]
            image_order = torch.stack([torch.randperm(self.count, generator=g) for g in generators]).to(self.device)
            view_numbers = torch.stack(
                [torch.randint(augmentation.view_count, (self.count,), generator=g) for g in generators]
            ).to(self.device)
            for first in range(0, self.count - batch_size + 1, batch_size):
                batch_positions = image_order[:, first : first + batch_size]
                images = augmentation(
                    pixels[batch_positions].flatten(0, 1),
                    view_numbers[:, first : first + batch_size].flatten(),
                )
                yield normalise(images).view(*batch_positions.shape, *images.shape[1:]), labels[batch_positions]
            epoch += 1

    def modes(self, runs: int) -> tuple[Tensors, Tensors]:
        """Train members of the recipe, one for each run; return their parameters and buffers, (run, *shape).

        The members' seeds are 1,000,000 and up. Members are trained once and stored in the folder; the result is a
        copy.

        Args:
            runs: number of runs.

        Raises:
            UsageError: a training loss was not finite.
        """
        if runs not in self._trained_modes:
            self._trained_modes[runs] = self._load_or_train_modes(runs)
        return self._split_states({name: tensor.clone() for name, tensor in self._trained_modes[runs].items()})

    def _load_or_train_modes(self, runs: int) -> Tensors:
        """Read the modes from the folder, or train the modes and store them in the folder; return the modes' states."""
        path = None if self.folder is None else self.folder / f"modes-{self._modes_key(runs)}.safetensors"
        if path is not None and path.is_file():
            return read_modes(path)
        modes = train_modes(self.recipe, self.images, runs, self.device, f"modes of recipe {self.recipe.name!r}")
        if path is not None:
            with replace_file(path, "wb") as file:
                file.write(save(modes))
        return modes

    def trained_state(self, runs: int) -> StackState:
        """Return the modes as a training state with zero momentum at epoch 0, from which training can continue."""
        params, buffers = self.modes(runs)
        return StackState(
            params=params,
            momentum={name: torch.zeros_like(p) for name, p in params.items()},
            buffers=buffers,
            loss=torch.zeros(runs, device=self.device),
            failed_step=torch.full((runs,), -1, device=self.device),
            scaling={name: t.to(self.device) for name, t in first_scaling(self.recipe, runs).items()},
        )

    def _modes_key(self, runs: int) -> str:
        hashed_values = [self.recipe.hash, self.images.fingerprint, runs, torch.__version__]
        hashed_values += [name] if (name := gpu_name(self.device)) else []
        return hashlib.sha256(json.dumps(hashed_values).encode()).hexdigest()[:12]

    def _split_states(self, stacked_tensors: Tensors) -> tuple[Tensors, Tensors]:
        parameter_names = [
            name for name, _ in self.network().named_parameters()
        ]  # Noise is drawn in this order of tensors, which differs from the order in a file.
        tensors_on_device = {name: tensor.to(self.device) for name, tensor in stacked_tensors.items()}
        return {n: tensors_on_device[n] for n in parameter_names}, {
            n: t for n, t in tensors_on_device.items() if n not in parameter_names
        }

    @cached_property
    def tied_names(self) -> dict[str, str]:
        """Further names of tied parameters in a state dict -> first name."""
        return tied_names(self.network())

    def add_tied_names(self, stacked_tensors: Mapping[str, Tensor]) -> Tensors:
        """Add the further names of tied parameters, which are trained under their first name; return name -> tensor."""
        return {**stacked_tensors, **{name: stacked_tensors[first] for name, first in self.tied_names.items()}}

    def finish(self, params: Mapping[str, Tensor]) -> Tensors:
        """Complete stacked parameters to state dicts; return name -> (draw, *shape), float32 on the CPU.

        Running statistics are estimated anew on the training images for each draw; other buffers are copied from a
        newly built network; counters are left out.

        Args:
            params: stacked parameters, name -> (draw, *shape).

        Raises:
            UsageError: a layer that is no batch norm has running statistics, or some buffers are random when the
                network is built.
        """
        self._check_buffers()
        stacked_tensors = self.add_tied_names({name: tensor.detach().float().cpu() for name, tensor in params.items()})
        draw_count = len(next(iter(stacked_tensors.values())))
        skeleton = self.network().eval()
        for name, tensor in skeleton.state_dict().items():
            if name not in stacked_tensors and not is_counter(name):
                stacked_tensors[name] = tensor.expand(draw_count, *tensor.shape).clone()
        if self.has_norms:
            stacked_tensors = reestimate_statistics(
                skeleton, stacked_tensors, list(torch.split(self.inputs.cpu(), FORWARD_BATCH))
            )
        return {name: tensor.contiguous() for name, tensor in stacked_tensors.items()}


def _select_images(images: ImageData, positions: slice) -> ImageData:
    labels = None if images.labels is None else images.labels[positions]
    return replace(images, images=images.images[positions], labels=labels)
