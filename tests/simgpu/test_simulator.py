"""The simulated cards themselves: each mistake that they are there to show is made here, and is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.simgpu import cards
from tests.simgpu.counts import counting
from tests.simgpu.faults import OUT_OF_MEMORY, failing
from tests.simgpu.kernels import round_to_tf32
from tests.simgpu.rules import Mismatch, NotCapturable, Waited

pytestmark = pytest.mark.simgpu


def captured(work: Callable[[], Any], mode: str = "thread_local") -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture work; return the graph and what the work returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        result = work()
    return graph, result


def test_arithmetic_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, 8, 8), torch.randn(5, 3, 3, 3)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = F.conv2d(x.cuda(), weight.cuda().requires_grad_())
    assert torch.equal(found.cpu(), F.conv2d(x, weight))
    found.sum().backward()
    assert torch.equal(torch.func.vmap(torch.sin)(x.cuda()).cpu(), x.sin())
    with torch.autocast("cuda", torch.bfloat16):
        assert (x.cuda().flatten(1) @ x.cuda().flatten(1).T).dtype == torch.bfloat16


def test_memory_that_was_never_written_is_nan() -> None:
    assert torch.empty(100_000, device="cuda").isnan().all()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda a: a.cuda() + a,
        lambda a: torch.cat([a, a.cuda()]),
        lambda a: a[torch.zeros(1, dtype=torch.int64, device="cuda")],
        lambda a: torch.randn(2, device="cuda", generator=torch.Generator()),
        lambda a: torch.randn(2, generator=torch.Generator("cuda")),
    ],
)
def test_devices_that_differ(mistake: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((Mismatch, RuntimeError), match=r"Expected .* device"):
        mistake(torch.ones(3))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_tensors_on_two_cards() -> None:
    a = torch.ones(3, device="cuda:0")
    with pytest.raises(Mismatch, match="tensors on cuda:0, cuda:1"):
        a + a.to("cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:2")


def test_memory_is_short() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert before - torch.cuda.mem_get_info()[0] == 2**28
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device="cuda")
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_an_error_is_injected(name: str) -> None:
    x = torch.ones(1, 1, 4, 4, device="cuda")
    with failing("convolution", OUT_OF_MEMORY[name], times=1):
        with pytest.raises(RuntimeError) as caught:
            F.conv2d(x, x)
        assert type(caught.value) is type(OUT_OF_MEMORY[name]())
        assert F.conv2d(x, x).item() == 16


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_waits() -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for wait in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x[x > 0], lambda: torch.ones(3).cuda()):
            with pytest.raises(Waited):
                wait()
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with counting() as counts:
        x.sum().item()
        torch.cuda.synchronize()
    assert (counts.waits.total(), counts.synchronisations, counts.host_waits) == (1, 1, 2)
    [((name, place), _)] = counts.waits.items()
    assert name == "_local_scalar_dense"
    assert place.startswith("tests/simgpu/test_simulator.py:")


def test_counts() -> None:
    x, kernel, bias = (torch.ones(*s, device="cuda") for s in ((2, 3, 8, 8), (4, 3, 3, 3), (4,)))
    out = 4 * 2 * 4 * 6 * 6
    with counting() as counts:
        F.conv2d(x, kernel)
    assert (counts.launches, counts.written) == (1, out)
    assert counts.read == 4 * (x.numel() + kernel.numel())
    with counting() as counts:
        F.conv2d(x, kernel, bias)  # cuDNN adds the bias to what it has written
    assert (counts.launches, counts.written) == (2, 2 * out)
    assert counts.read == 4 * (x.numel() + kernel.numel() + bias.numel()) + out
    with counting() as counts:
        x.view(-1)[3:].add_(1)
        x[:0] + 1
        torch.empty(3, device="cuda").copy_(torch.ones(3))
    assert counts.operations == {"add_": 1, "copy_": 1}
    assert (counts.to_card, counts.from_card) == (12, 0)
    with counting() as counts:
        x.cpu()
    assert (counts.to_card, counts.from_card) == (0, 4 * x.numel())
    with counting() as counts:
        graph, _ = captured(lambda: F.conv2d(x, kernel, bias))
        graph.replay()
    assert (counts.launches, counts.captures, counts.replayed_launches) == (0, [{"convolution": 2}], 2)


def test_a_capture_computes_nothing_until_its_replay() -> None:
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")

    def work() -> Tensor:
        y = F.relu(x) * 2
        total.add_(y)
        return y

    with counting() as counts:
        graph, y = captured(work)
        assert y.isnan().all()
        assert total.tolist() == [0, 0, 0]
        x.fill_(3)
        graph.replay()
        graph.replay()
    assert (y.tolist(), total.tolist()) == ([6, 6, 6], [12, 12, 12])
    assert counts.captures == [{"relu": 1, "mul": 1, "add_": 1}]
    assert (counts.replays, counts.replayed_launches) == (2, 6)


def test_a_capture_draws_anew_in_each_replay() -> None:
    torch.manual_seed(1)
    graph, drawn = captured(lambda: torch.rand(5, device="cuda"))
    states = []
    for _ in range(2):
        graph.replay()
        states.append(drawn.clone())
    assert not torch.equal(*states)


def test_a_generator_may_not_be_asked_in_a_capture() -> None:
    def work() -> None:
        torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match="captur"):
            torch.cuda.default_generators[0].get_offset()

    captured(work)


def test_a_graph_does_not_keep_what_it_reads() -> None:
    x, held = torch.ones(3, device="cuda"), [torch.ones(3, device="cuda")]
    graph, _ = captured(lambda: x + held[0])
    graph.replay()
    held.clear()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()
    [failure] = cards.GRAPHS.failures
    assert failure.startswith("tests/simgpu/test_simulator.py:")
    assert failure.endswith("aten.add.Tensor: a graph reads memory that was freed")
    cards.GRAPHS.failures.clear()


@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize()])
def test_a_capture_may_not_wait(wait: Callable[[Tensor], object]) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises((NotCapturable, RuntimeError), match=r"captur"):
        captured(lambda: wait(x))


@pytest.mark.parametrize(("mode", "fails"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_another_thread_allocates_during_a_capture(mode: str, fails: bool) -> None:
    x = torch.ones(3, device="cuda")

    def work() -> Tensor:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        return x + 1

    def allocate() -> None:
        try:
            held.append(torch.empty(2**27, device="cuda"))
        except RuntimeError as error:
            errors.append(error)

    held: list[Tensor] = []
    errors: list[RuntimeError] = []
    if fails:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            captured(work, mode)
        assert "capturing" in str(errors[0])
    else:
        graph, y = captured(work, mode)
        graph.replay()
        assert y.tolist() == [2, 2, 2]
        assert errors == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_of_one_card_holds_nothing_of_another() -> None:
    x = torch.ones(3, device="cuda:1")
    graph, y = captured(lambda: x + 1)  # the current card is the first
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_tf32_rounds_operands() -> None:
    one = 1 + 2.0**-11  # half way between two values of 10 bits
    assert round_to_tf32(torch.tensor([one, 1 + 2.0**-12, float("inf")])).tolist() == [1 + 2.0**-10, 1, float("inf")]
    assert round_to_tf32(torch.tensor([float("nan")])).isnan().all()
    x = torch.full((1, 1, 1, 1), one, device="cuda")
    weight = torch.ones(1, 1, 1, 1, device="cuda")
    for allowed in (False, True):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            assert F.conv2d(x, weight).item() == (1 + 2.0**-10 if allowed else one)
    assert (x[0, 0] @ weight[0, 0]).item() == one  # products are exact unless asked for otherwise


@pytest.mark.parametrize("groups", [1, 2])
def test_fused_convolutions(groups: int) -> None:
    torch.manual_seed(0)
    x, weight, bias, z = (
        torch.randn(2, 4, 6, 6),
        torch.randn(8, 4 // groups, 3, 3),
        torch.randn(8),
        torch.randn(2, 8, 3, 3),
    )
    geometry = ((2, 2), (1, 1), (1, 1), groups)
    plain = F.conv2d(x, weight, bias, 2, 1, 1, groups)
    on_card = [t.cuda() for t in (x, weight, bias, z)]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.no_grad(), counting() as counts:
        found = torch.cudnn_convolution_relu(on_card[0], on_card[1], on_card[2], *geometry)
        added = torch.cudnn_convolution_add_relu(on_card[0], on_card[1], on_card[3], 0.5, on_card[2], *geometry)
    assert counts.operations == {"cudnn_convolution_relu": 1, "cudnn_convolution_add_relu": 1}
    torch.testing.assert_close(found.cpu(), plain.relu(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(added.cpu(), (plain + 0.5 * z).relu(), rtol=1e-5, atol=1e-5)
