"""A training step on a GPU that is captured once as a CUDA graph: the host then launches a step instead of its kernels.

A step of a small network is hundreds of kernels, and the host takes longer to launch a kernel than the GPU to run it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from checkpoints_zoo.training.recipe import error_line

# Number of steps before the capture: in the first, libraries load their kernels; in the first two, torch.compile works.
WARM_UP_STEPS = 3


class CapturedStep:
    """Takes the steps of an epoch, one a call, by replaying a CUDA graph.

    The inputs of all steps of an epoch are on the GPU, and so is the number of the next step: the graph reads the
    number, takes the inputs of this step, and counts up. So a step copies nothing and waits for nothing.

    The first epoch's start captures the step, replays it once, and compares the result with the step's own, bit for
    bit. If the step can't be captured, or the bits differ, a warning says so, and all steps run without a graph.

    Args:
        step: function of one step's inputs, which changes tensors in place. The function draws no random numbers, keeps
            nothing from one call to the next but in `changed_tensors`, and does not wait for the GPU.
        changed_tensors: all tensors that the step changes, on one GPU; no other tensors may take their place later.
    """

    def __init__(self, step: Callable[..., None], changed_tensors: Sequence[Tensor]) -> None:
        self.step, self.changed_tensors = step, changed_tensors
        self.next_step = torch.zeros(1, dtype=torch.int64, device=changed_tensors[0].device)
        self.inputs: tuple[Tensor, ...] = ()  # The graph reads and writes these tensors, and those that `step` holds.
        self.graph: torch.cuda.CUDAGraph | None = None

    def start_epoch(self, *inputs: Tensor) -> None:
        """Set the inputs of the next steps.

        Args:
            inputs: inputs of the steps on the GPU, (step, …) each, of the same shapes in each epoch.
        """
        if self.inputs:
            for old_input, new_input in zip(self.inputs, inputs, strict=True):
                old_input.copy_(new_input)
        else:
            self.inputs = inputs
            self.graph = self._capture()
        self.next_step.zero_()

    def __call__(self) -> None:
        """Take the next step."""
        with torch.cuda.device(self.next_step.device):
            if self.graph is None:
                self._take_next_step()
            else:
                self.graph.replay()

    def _take_next_step(self) -> None:
        self.step(*(step_input.index_select(0, self.next_step)[0] for step_input in self.inputs))
        self.next_step += 1

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Capture the step, and leave all tensors as they were; return the graph, or None after a warning."""
        first_values = [tensor.clone() for tensor in self.changed_tensors]

        def restore_first_values() -> None:
            self.next_step.zero_()
            torch._foreach_copy_(list(self.changed_tensors), first_values)

        # A capture belongs to the current device, and needs another stream than the default stream.
        with torch.cuda.device(self.next_step.device):
            current_stream = torch.cuda.current_stream()
            side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side_stream.wait_stream(current_stream)
            with torch.cuda.stream(side_stream):
                for _ in range(WARM_UP_STEPS):
                    restore_first_values()
                    self._take_next_step()
                step_results = [tensor.clone() for tensor in self.changed_tensors]
            current_stream.wait_stream(side_stream)
            restore_first_values()
            graph = torch.cuda.CUDAGraph()
            try:
                # With the mode "global", copies to the GPU by other threads would make the capture fail.
                with torch.cuda.graph(graph, stream=side_stream, capture_error_mode="thread_local"):
                    self._take_next_step()
                restore_first_values()
                graph.replay()
                failure = "" if _are_equal(self.changed_tensors, step_results) else "its replay gives other bits"
            except RuntimeError as error:
                # The end of a failed capture raises an error of its own, which hides the first.
                failure = error_line(error.__context__ if isinstance(error.__context__, RuntimeError) else error)
            finally:
                torch.cuda.set_stream(current_stream)  # A failed capture leaves the other stream as the current stream.
                restore_first_values()
        if not failure:
            return graph
        warnings.warn(f"a training step can't be captured as a CUDA graph, so it is slower: {failure}", stacklevel=2)
        return None


def _are_equal(tensors: Sequence[Tensor], other_tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal bit for bit, except that all NaNs are equal."""
    pairs = zip(tensors, other_tensors, strict=True)
    return bool(torch.stack([((a == b) | ((a != a) & (b != b))).all() for a, b in pairs]).all())
