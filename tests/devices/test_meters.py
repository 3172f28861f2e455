"""Meters: what they count, and that several readers of one counter do not disturb each other."""

import gc
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import bayplan
from bayplan import torch_compat
from bayplan.devices import meters
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.devices.meters import (
    SharedMeter,
    StorageMeter,
    open_meter,
    resident_tensor_bytes,
)

MIB = 2**20
SLACK_BYTES = 64 * 1024
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_cpu_is_metered_by_malloc(cache):
    with open_meter(CPU, cache) as meter:
        assert meter.method == "malloc"
        before = meter.live_bytes
        kept = block(6 * MIB)
        block(2 * MIB)
        assert abs(meter.live_bytes - before - 6 * MIB) < SLACK_BYTES
        assert abs(meter.peak_bytes - before - 8 * MIB) < SLACK_BYTES
        meter.reset_peak()
        assert abs(meter.peak_bytes - meter.live_bytes) < SLACK_BYTES
        del kept
        assert abs(meter.live_bytes - before) < SLACK_BYTES


def test_readers_of_one_counter_have_peaks_of_their_own(cache):
    with open_meter(CPU, cache) as first, open_meter(CPU, cache) as second:
        start = first.live_bytes
        block(10 * MIB)
        second.reset_peak()
        block(4 * MIB)
        assert abs(first.peak_bytes - start - 10 * MIB) < SLACK_BYTES
        assert abs(second.peak_bytes - start - 4 * MIB) < SLACK_BYTES
        first.reset_peak()
        assert abs(second.peak_bytes - start - 4 * MIB) < SLACK_BYTES
        assert abs(first.peak_bytes - start) < SLACK_BYTES
    assert meters._sharing == []


def test_reader_that_fails_is_forgotten(cache):
    with pytest.raises(ZeroDivisionError), open_meter(CPU, cache):
        raise ZeroDivisionError
    assert meters._sharing == []


def test_curve_is_taken_once(cache):
    with open_meter(CPU, cache) as meter:
        assert isinstance(meter, SharedMeter)
        assert meter.take_curve() is None
        meter.start_curve()
        block(MIB)
        curve = meter.take_curve()
        assert curve is not None
        assert len(curve.times_ns) == 2
        assert meter.take_curve() is None


@pytest.fixture
def _no_compiler(monkeypatch):
    """As in a process that has not warned yet."""

    def refuse(cache):
        raise MeterUnavailable("malloc counter: no C compiler")

    monkeypatch.setattr(MallocCounter, "attach", refuse)
    meters._warn_of_storages.cache_clear()
    yield
    meters._warn_of_storages.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
def test_fallback_warns_with_the_reason(cache):
    with (
        pytest.warns(UserWarning, match="scratch memory of kernels is missed.*no C compiler"),
        open_meter(CPU, cache) as meter,
    ):
        assert isinstance(meter, StorageMeter)


@pytest.mark.usefixtures("_no_compiler")
def test_fallback_warns_once_and_at_the_users_line(monkeypatch, cache):
    monkeypatch.setenv("BAYPLAN_CACHE", str(cache))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with bayplan.record() as recording:  # the user's line
                recording.step()
            bayplan.profile(nn.Linear(2, 2), torch.ones(1, 2), lambda y: y.sum(), repeats=1)
    (warning,) = caught
    assert warning.filename == __file__
    line = Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert line.endswith("# the user's line")


def test_fallback_of_the_command_line_warns_at_its_first_line(tmp_path):
    """No frame is the user's there; the parser of the command line is none to name."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "parser.py").write_text("def call(function):\n    function('no C compiler')\n")
    program = folder / "program.py"
    program.write_text(
        "import parser\nfrom bayplan.devices import meters\nparser.call(meters._warn_of_storages)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    )
    assert ended.stderr.startswith(f"{program}:3: UserWarning: memory is measured by tensor")


def test_storage_meter_counts_each_storage_once_until_it_is_released():
    old = block(3 * MIB)
    with StorageMeter() as meter:
        view = old[1:]  # not new: it was there before
        assert (meter.live_bytes, meter.peak_bytes) == (0, 0)
        new = block(5 * MIB)
        part = new[: 2 * MIB]
        assert meter.live_bytes == 5 * MIB
        del new
        assert meter.live_bytes == 5 * MIB
        del part
        assert (meter.live_bytes, meter.peak_bytes) == (0, 5 * MIB)
        meter.reset_peak()
        assert meter.peak_bytes == 0
        old.add_(1)
        assert meter.live_bytes == 0
        del old, view
        # As with malloc: what was there before and goes leaves less than there was.
        assert meter.live_bytes == -3 * MIB


def test_storage_meter_sees_what_no_operator_reads_released():
    old = block(3 * MIB)
    with StorageMeter() as meter:
        assert meter.know(old.untyped_storage())
        assert not meter.know(old.untyped_storage())
        assert not meter.know(None)
        assert meter.live_bytes == 0
        del old
        assert meter.live_bytes == -3 * MIB


def test_compiled_function_runs_compiled_under_the_storage_meter():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    function = torch.compile(lambda x: (x + 1) * 2, backend=backend, fullgraph=True)
    with StorageMeter() as meter:
        made = function(torch.ones(MIB // 4))
        assert made.sum() == MIB
        del made
    assert len(graphs) == 1
    assert (meter.live_bytes, meter.peak_bytes) == (0, 3 * MIB)


def test_storage_meter_sees_backward():
    model = nn.Linear(256, 256)
    with StorageMeter() as meter:
        model(torch.ones(8, 256)).sum().backward()
        gc.collect()
        assert meter.live_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert meter.peak_bytes > meter.live_bytes


def test_resident_bytes_leave_out_fake_sparse_and_meta_tensors():
    before = resident_tensor_bytes(CPU)
    with torch.device("meta"):
        weightless = nn.Linear(1000, 1000)
    sparse = torch.eye(4).to_sparse()
    assert resident_tensor_bytes(CPU) - before < 1000
    del weightless, sparse
    dense = torch.ones(1000, 250)
    assert resident_tensor_bytes(CPU) - before == 1_000_000
    del dense


def test_resident_bytes_leave_out_the_wrappers_of_tracing():
    kept = []

    def leaky(x):
        kept.append(x + 1)
        return x.sum()

    before = resident_tensor_bytes(CPU)
    with torch_compat.FakeTensorMode():
        torch.func.functionalize(leaky)(torch.empty(1000, 250))
    assert kept[0].untyped_storage().nbytes() == 1_000_000  # so it says; a fake lies behind it
    assert resident_tensor_bytes(CPU) == before
