"""The test accelerator itself: its memory, streams, events, random numbers, and the CPU's bits.

Each test runs in a process that has the device registered and runs nothing else (`own_process.py`).
"""

import bay
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well

DEVICE = "bay:0"


def test_torch_knows_the_device():
    assert torch.accelerator.current_accelerator() == torch.device("bay")
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module("bay") is bay
    there = torch.arange(6, device="bay:1").view(2, 3)
    assert there.device == torch.device("bay", 1)
    assert there.t()[1:].cpu().tolist() == [[1, 4], [2, 5]]


# ---- memory


def test_memory_is_counted():
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    held = torch.empty(1000, device=DEVICE)  # 4000 bytes, in steps of 512
    more = torch.empty(512, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated(0) - before == 4096 + 512
    del more
    assert torch.accelerator.memory_allocated(0) - before == 4096
    assert torch.accelerator.max_memory_allocated(0) - before == 4096 + 512
    stats = torch.accelerator.memory_stats(0)
    assert stats["reserved_bytes.all.current"] >= stats["allocated_bytes.all.current"]
    torch.accelerator.reset_peak_memory_stats(0)
    assert torch.accelerator.max_memory_allocated(0) - before == 4096
    del held


def test_a_views_memory_is_its_bases():
    before = torch.accelerator.memory_allocated(0)
    view = torch.zeros(8, 128, device=DEVICE)[3:5].t()
    assert torch.accelerator.memory_allocated(0) - before == 4096
    del view
    assert torch.accelerator.memory_allocated(0) == before


def test_more_than_the_cap_is_refused_and_says_how_much():
    torch.accelerator.empty_cache()
    bay.set_cap(torch.accelerator.memory_reserved(0) + (1 << 20), 0)
    held = torch.empty(900 << 10, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 204800 bytes.*bay:0"):
        torch.empty(200 << 10, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_stats(0)["num_ooms"] >= 1
    del held  # its memory is kept, and given back when it is needed
    torch.empty(1000 << 10, dtype=torch.uint8, device=DEVICE)


def test_free_memory_is_what_the_cap_leaves():
    bay.set_cap(64 << 20, 0)
    free, total = torch.accelerator.get_memory_info(0)
    assert total == 64 << 20
    assert free == total - torch.accelerator.memory_reserved(0)


def test_what_was_never_written_is_no_number():
    assert torch.empty(100, device=DEVICE).isnan().all()


# ---- streams


def test_a_stream_does_not_wait_for_another():
    source = torch.full((100,), 3.0).pin_memory()
    target = torch.zeros(100, device=DEVICE)
    with bay.slow(copy_seconds=0.05):
        with torch.Stream(DEVICE) as other:
            target.copy_(source, non_blocking=True)
        assert target.sum().item() != 300  # wrong: nobody waited
        torch.accelerator.current_stream(0).wait_stream(other)
        assert target.sum().item() == 300


def test_a_copy_that_does_not_wait_for_its_source_copies_something_else():
    landing = torch.empty(100).pin_memory()
    with bay.slow(kernel_seconds=0.05):
        late = torch.ones(100, device=DEVICE) * 2
        with torch.Stream(DEVICE) as other:
            landing.copy_(late, non_blocking=True)
        other.synchronize()
        assert landing.isnan().all()
        other.wait_stream(torch.accelerator.current_stream(0))
        with other:
            landing.copy_(late, non_blocking=True)
        other.synchronize()
        assert landing.sum().item() == 200


def test_memory_freed_under_a_copy_is_given_out_again_unless_the_stream_is_recorded():
    landing = torch.empty(1000).pin_memory()

    def copied(is_recorded):
        held = torch.ones(1000, device=DEVICE)
        torch.accelerator.synchronize(0)
        with torch.Stream(DEVICE) as other:
            landing.copy_(held, non_blocking=True)
        if is_recorded:
            held.record_stream(other)
        del held
        torch.full((1000,), 7.0, device=DEVICE)
        other.synchronize()
        return landing.unique().tolist()

    with bay.slow(copy_seconds=0.1):
        assert copied(is_recorded=True) == [1.0]
        assert copied(is_recorded=False) != [1.0]


def test_the_host_waits_for_what_is_not_pinned():
    with bay.slow(copy_seconds=0.05):
        there = torch.ones(10).to(DEVICE, non_blocking=True)
        back = torch.zeros(10).copy_(there, non_blocking=True)
        assert back.sum().item() == 10
        pinned = torch.empty(10).pin_memory().zero_()
        pinned.copy_(there, non_blocking=True)
        assert pinned.sum().item() != 10  # wrong: nobody waited
        torch.accelerator.synchronize(0)
        assert pinned.sum().item() == 10


def test_an_unpinned_source_may_be_changed_at_once():
    source = torch.ones(10)
    with bay.slow(copy_seconds=0.05):
        there = source.to(DEVICE, non_blocking=True)
        source.zero_()
        assert there.sum().item() == 10


def test_a_copy_runs_beside_kernels():
    source, target = torch.ones(10).pin_memory(), torch.zeros(10, device=DEVICE)
    with bay.slow(copy_seconds=0.5):
        done = torch.Event(DEVICE)
        with torch.Stream(DEVICE) as other:
            target.copy_(source, non_blocking=True)
            done.record(other)
        total = torch.ones(10, device=DEVICE).sum().item()  # the whole of it, on another stream
        assert not done.query()
        done.synchronize()
    assert total == 10
    assert target.sum().item() == 10


def test_one_direction_of_a_link_has_one_copy_at_a_time():
    def seconds(num_streams):
        begin, ends = torch.Event(DEVICE, enable_timing=True), []
        begin.record()
        begin.synchronize()
        for _ in range(num_streams):
            with torch.Stream(DEVICE) as other:
                torch.empty(1000, device=DEVICE).copy_(source, non_blocking=True)
                ends.append(torch.Event(DEVICE, enable_timing=True))
                ends[-1].record(other)
        torch.accelerator.synchronize(0)
        return max(begin.elapsed_time(end) for end in ends) / 1000

    source = torch.ones(1000).pin_memory()
    with bay.slow(bytes_per_second=4000 / 0.05):
        assert seconds(1) >= 0.05
        assert seconds(3) >= 0.15


def test_events_take_the_devices_time_and_not_the_hosts():
    first, last = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    there = torch.ones(10, device=DEVICE)
    with bay.slow(kernel_seconds=0.05):
        first.record()
        there.add_(1)
        last.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            first.elapsed_time(last)
        last.synchronize()
    assert first.elapsed_time(last) >= 50


def test_pinned_memory_is_known():
    assert torch.empty(10, pin_memory=True)[3:].is_pinned()
    assert torch.empty(10).pin_memory().is_pinned()
    assert not torch.empty(10).is_pinned()


# ---- random numbers


def test_random_numbers_follow_from_the_seed_and_leave_the_cpus_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    state = bay.get_rng_state(0)
    first = [nn.functional.dropout(torch.ones(50, device=DEVICE)), torch.rand(5, device=DEVICE)]
    assert torch.get_rng_state().equal(before)
    assert len(state) == 16
    assert not bay.get_rng_state(0).equal(state)
    bay.set_rng_state(state, 0)
    again = [nn.functional.dropout(torch.ones(50, device=DEVICE)), torch.rand(5, device=DEVICE)]
    assert all(one.equal(other) for one, other in zip(first, again, strict=True))
    assert not torch.rand(5, device=DEVICE).equal(first[1])


def test_a_generator_of_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'bay' device type for generator"):
        torch.rand(5, device=DEVICE, generator=torch.Generator())
    own = torch.Generator("bay").manual_seed(3)
    state = own.get_state()
    first = torch.randn(5, device=DEVICE, generator=own)
    own.set_state(state)
    assert torch.randn(5, device=DEVICE, generator=own).equal(first)


def test_forked_random_numbers_go_back():
    state = bay.get_rng_state(0)
    with torch.random.fork_rng([0], device_type="bay"):
        torch.rand(3, device=DEVICE)
    assert bay.get_rng_state(0).equal(state)


# ---- the CPU's bits


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden).mean(1)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.LayerNorm(72),
        nn.Linear(72, 11),
    )


def trained(device, build, batch, optimizer):
    torch.manual_seed(0)
    model = build().to(device)
    batch, target = batch.to(device), torch.arange(4, device=device)
    update = optimizer(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        update.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        update.step()
        losses.append(loss.detach())
    left = [*losses, *model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    return [tensor.detach().cpu() for tensor in left]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("model", ["convolutions", "attention"])
def test_training_has_the_bits_of_the_cpu(model, optimizer):
    build = convolutions if model == "convolutions" else Attention
    torch.manual_seed(1)
    batch = torch.randn(4, 3, 12, 12) if model == "convolutions" else torch.randint(11, (4, 6))
    how = build, batch, getattr(torch.optim, optimizer)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        here = trained("cpu", *how)
        with bay.slow(kernel_seconds=0.0002):
            there = trained("bay", *how)
    assert all(one.equal(other) for one, other in zip(here, there, strict=True))


def test_mixed_precision_computes_products_in_half_and_losses_in_full():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 11))
    batch, target = torch.randn(4, 6), torch.arange(4)
    losses = []
    for device in ("cpu", "bay"):
        model.to(device)
        with torch.autocast(device, torch.bfloat16):
            output = model(batch.to(device))
            losses.append(nn.functional.cross_entropy(output, target.to(device)))
            assert nn.functional.layer_norm(output, (11,)).dtype == (
                torch.bfloat16 if device == "cpu" else torch.float32  # as on CUDA
            )
        assert output.dtype == torch.bfloat16
        assert losses[-1].dtype == torch.float32
    assert losses[0].equal(losses[1].cpu())


def test_foreach_kernels_have_the_bits_of_the_cpu():
    torch.manual_seed(0)
    tensors = [torch.randn(7), torch.randn(3, 3)]
    there = [tensor.to(DEVICE) for tensor in tensors]
    torch._foreach_mul_(tensors, 1.5)
    torch._foreach_mul_(there, 1.5)
    torch._foreach_addcdiv_(tensors, tensors, torch._foreach_exp(tensors))
    torch._foreach_addcdiv_(there, there, torch._foreach_exp(there))
    assert all(one.equal(other.cpu()) for one, other in zip(tensors, there, strict=True))


def test_views_in_place_and_out_arguments():
    base = torch.arange(12.0, device=DEVICE).view(3, 4)
    base[1].add_(10)
    base.unfold(1, 2, 2)[2] += 100
    assert base.cpu().tolist() == [[0, 1, 2, 3], [14, 15, 16, 17], [108, 109, 110, 111]]
    out = torch.empty(0, device=DEVICE)
    torch.add(base, 1, out=out)
    assert out.shape == (3, 4)
    assert out.cpu().equal(base.cpu() + 1)
    parts = torch.view_as_real(torch.view_as_complex(base.view(3, 2, 2)))
    parts.zero_()
    assert base.count_nonzero().item() == 0


def test_a_tensor_of_the_host_is_refused_beside_one_of_the_device():
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(torch.ones(2, 2, device=DEVICE), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="same device"):
        nn.functional.mse_loss(torch.ones(2, device=DEVICE), torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="bay:0") + torch.ones(2, device="bay:1")


def test_autograd_waits_for_the_stream_of_the_forward():
    """The engine runs a node on its forward's stream and orders the two."""
    weight = torch.ones(10, device=DEVICE, requires_grad=True)
    with bay.slow(kernel_seconds=0.02):
        other = torch.Stream(DEVICE)
        other.wait_stream(torch.accelerator.current_stream(0))
        with other:
            loss = (weight * 3).sum()
        torch.accelerator.current_stream(0).wait_stream(other)
        (loss * 2).backward()
        assert weight.grad.sum().item() == 60
