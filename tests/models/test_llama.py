import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bayplan.models.llama import Llama, LlamaConfig, _rotary_angles, _rotate, build_llama_7b

TINY = LlamaConfig(
    num_layers=2, num_heads=2, width=16, hidden=24, context=8, vocabulary=32, dtype=torch.float32
)


def test_7b_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        model, (inputs, targets), loss_fn = build_llama_7b(1)
        output = model(inputs)
        loss_fn(output, targets).backward()
    assert output.shape == (1, 4096, 32000)
    assert output.dtype == torch.bfloat16
    assert all(isinstance(p.grad, FakeTensor) for p in model.parameters())


def test_config_sets_the_type_of_every_parameter() -> None:
    model = Llama(dataclasses.replace(TINY, dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # The tables stay exact: bfloat16 cannot tell far positions apart.
    assert model.rotary_cos.dtype == torch.float32
    assert model(torch.randint(32, (1, 8))).isfinite().all()


def test_a_token_does_not_change_what_was_said_before_it() -> None:
    torch.manual_seed(0)
    model = Llama(TINY)
    tokens = torch.randint(32, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 32
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_rotary_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    angles = _rotary_angles(TINY)
    query, key = torch.randn(2, 1, TINY.head_width).expand(2, TINY.context, -1).unbind()
    turned_query = _rotate(query, angles.cos(), angles.sin())
    turned_key = _rotate(key, angles.cos(), angles.sin())
    scores = turned_query @ turned_key.T
    for offset in range(-3, 4):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[0, 0], scores[0, 3])


def test_reset_parameters_fills_a_model_from_meta() -> None:
    with torch.device("meta"):
        from_meta = Llama(TINY)
    from_meta.to_empty(device="cpu")
    direct = Llama(TINY)
    for model in (from_meta, direct):
        torch.manual_seed(1)
        model.reset_parameters()
    tokens = torch.randint(32, (1, 8))
    assert torch.equal(from_meta(tokens), direct(tokens))
    assert torch.equal(direct.rotary_sin, _rotary_angles(TINY).sin())


def test_heads_must_hold_whole_pairs() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        LlamaConfig(width=12, num_heads=4)
