"""Report 004's runs: the link behind each, the gradients, and Horovod drawn as it ran."""

from importlib import import_module
from pathlib import Path

import pytest

from bayplan.planning.buckets.bucket_plan import horovod_timeline, least_end_seconds
from bayplan.planning.buckets.bucketing import plan_buckets

MIB = 2**20


@pytest.fixture(scope="module")
def parts():
    """The modules of the benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield {
            name: import_module(f"report_004.{name}") for name in ("report", "fitting", "backward")
        }


@pytest.fixture(scope="module")
def layers(parts):
    return {name: parts["backward"].layers_of(name) for name in ("resnet50", "vgg16")}


def test_gradients_have_the_bytes_of_the_reports_steps(parts, layers):
    for run in parts["report"].RUNS:
        own = sum(size for layer in layers[run.model] for _, size in layer.parameters)
        assert own == pytest.approx(run.step_bytes, rel=1e-3)
    sizes = {name: size for layer in layers["vgg16"] for name, size in layer.parameters}
    assert sizes["classifier.0.weight"] == 392 * MIB
    assert sum(sizes.values()) / MIB == pytest.approx(527.8, abs=0.05)
    assert sum(size for layer in layers["resnet50"] for _, size in layer.parameters) / MIB == (
        pytest.approx(97.5, abs=0.05)
    )


def test_backward_begins_with_the_last_layer_and_has_known_operations(layers):
    """VGG16 has 15.47 G products for an image, ResNet-50 4.09 G; two gradients of each."""
    assert layers["vgg16"][0].parameters[-1][0] == "classifier.6.weight"
    assert layers["vgg16"][-1].parameters[-1][0] == "features.0.weight"
    for name, products in (("vgg16", 15.47e9), ("resnet50", 4.09e9)):
        flops = sum(layer.backward_flops for layer in layers[name])
        first = layers[name][-1].backward_flops  # without the gradient of the images
        assert flops + first == pytest.approx(4 * products, rel=2e-3)


def test_gradients_are_ready_by_the_end_of_backward(parts, layers):
    row = parts["backward"].gradients(layers["vgg16"], seconds=2.0)
    ready = [one.ready_seconds for one in row]
    assert ready == sorted(ready)
    assert ready[0] > 0
    assert ready[-1] == pytest.approx(2.0)


def test_fitted_links_take_as_long_as_the_report_for_its_messages(parts):
    for run in parts["report"].RUNS:
        link = parts["fitting"].fitted_link(run.classes)
        fitted = link.total_seconds(run.classes) / run.num_steps
        assert fitted == pytest.approx(run.step_seconds, rel=5e-3)
        assert link.largest_error(run.classes) < 0.2


def test_horovod_as_drawn_takes_as_long_as_it_did(parts, layers):
    """Within 6 %: the tuner tried several settings, of which only the named one is drawn."""
    for run in parts["report"].RUNS:
        link = parts["fitting"].fitted_link(run.classes)
        row = parts["backward"].gradients(layers[run.model], seconds=0.0)
        threshold = 4 * MIB if run.is_tuned else 64 * MIB
        drawn = horovod_timeline(row, link.cost, threshold_bytes=threshold, cycle_seconds=0.005)
        assert drawn.exchange_seconds == pytest.approx(run.step_seconds, rel=0.06)


def test_without_backward_planned_buckets_reach_the_bound(parts, layers):
    for run in parts["report"].RUNS:
        link = parts["fitting"].fitted_link(run.classes)
        row = parts["backward"].gradients(layers[run.model], seconds=0.0)
        bound = least_end_seconds(
            row, latency_seconds=link.latency_seconds, bytes_per_second=link.bytes_per_second
        )
        assert plan_buckets(row, link.cost).end_seconds == pytest.approx(bound)
        assert bound <= run.step_seconds
