"""Real models as chains: what is cut, sent, trained and kept is what stages have."""

import pytest

from bayplan.costing.catalogue import load_device
from bayplan.costing.pricing import derived_prices
from bayplan.models.targets import resolve_target
from bayplan.preparing.step import PreparedStep
from bayplan.tracing.joint import analyse_joint
from bayplan.tracing.stages import chaining
from bayplan.tracing.stages.chaining import chained, with_fixed_parts
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole_trace import trace_whole

KIND = load_device("titan-v")
NUM_SAMPLES = 4


@pytest.fixture(scope="module", params=["alexnet", "resnet18"])
def made(request):
    question = PreparedStep(target=resolve_target(request.param), batch=NUM_SAMPLES, device=KIND)
    step = question.step
    whole = trace_whole(step, num_samples=NUM_SAMPLES)
    with derived_prices(KIND) as price:
        joint = analyse_joint(
            whole.joint, num_forward_outputs=whole.num_forward_outputs, cost_of=price
        )
    return step, whole, joint, chained_with(whole, joint)


def chained_with(whole, joint):
    return chained(whole, joint, name="model", device="titan-v", spread=0.2)


def test_nothing_is_lost(made):
    step, _, joint, (chain, firsts) = made
    last = len(firsts) - 1
    assert chain.num_samples == NUM_SAMPLES
    trained = sum(one.nbytes for one in step.model.parameters())
    assert chain.parameter_bytes(0, last) == trained
    assert sum(chain.seconds(0, last, NUM_SAMPLES)) == pytest.approx(
        sum(op.seconds for op in joint.program.ops)
    )


def test_every_layer_has_something_to_train(made):
    assert all(layer.parameter_bytes for layer in made[3][0].layers)


def test_fewer_samples_take_less_time_and_less_memory(made):
    chain, _ = made[3]
    last = len(chain.layers) - 1
    assert sum(chain.seconds(0, last, 2)) < sum(chain.seconds(0, last, 4))
    assert chain.held_bytes(0, last, 2) == chain.held_bytes(0, last, 4) / 2


def test_what_does_not_grow_with_samples_is_told_apart(made):
    step, _, _, (large, firsts) = made
    whole = trace_whole(step, num_samples=2)
    with derived_prices(KIND) as price:
        joint = analyse_joint(
            whole.joint, num_forward_outputs=whole.num_forward_outputs, cost_of=price
        )
    small, small_firsts = chained_with(whole, joint)
    assert small_firsts == firsts
    chain, last = with_fixed_parts(large, small), len(firsts) - 1
    for samples, own in ((4, large), (2, small)):
        for found, priced in zip(
            chain.seconds(0, last, samples), own.seconds(0, last, samples), strict=True
        ):
            assert found == pytest.approx(priced, rel=0.02)
    assert chain.seconds(0, last, 2)[0] > chain.seconds(0, last, 4)[0] / 2


def test_a_cut_sends_what_stages_would_send(made):
    _, whole, _, (chain, firsts) = made
    for layer in (0, len(firsts) // 2, len(firsts) - 2):
        staged = StagedStep(whole, (0, firsts[layer + 1]))
        sent = sum(staged.whole.values[name].nbytes for name in staged.carried.forward[0, 1])
        assert chain.layers[layer].sent_bytes == sent


def test_too_many_layers_are_joined_where_most_would_be_sent(made, monkeypatch):
    _, whole, joint, (chain, firsts) = made
    monkeypatch.setattr(chaining, "MOST_LAYERS", 5)
    fewer, fewer_firsts = chained_with(whole, joint)
    assert len(fewer.layers) == 5
    assert set(fewer_firsts) < set(firsts)
    assert fewer.parameter_bytes(0, 4) == chain.parameter_bytes(0, len(chain.layers) - 1)
    dropped = set(firsts) - set(fewer_firsts)
    sent = {first: layer.sent_bytes for first, layer in zip(firsts[1:], chain.layers, strict=False)}
    assert min(sent[first] for first in dropped) >= max(sent[first] for first in fewer_firsts[1:])
