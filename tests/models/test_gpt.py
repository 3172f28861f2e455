import pytest
import torch

from bayplan.models.gpt import Gpt, GptConfig, build_gpt

TINY = GptConfig(num_layers=2, num_heads=2, width=16, context=8, vocabulary=32)


def test_a_token_does_not_change_what_was_said_before_it() -> None:
    torch.manual_seed(0)
    model = Gpt(TINY)
    tokens = torch.randint(32, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 32
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_head_is_the_token_embedding() -> None:
    model, (inputs, targets), loss_fn = build_gpt(2, config=TINY)
    loss_fn(model(inputs), targets).backward()
    # Only the head gives a gradient to tokens that do not occur in the input.
    absent = next(token for token in range(32) if not (inputs == token).any())
    gradient = model.get_parameter("token_embedding.weight").grad
    assert gradient is not None
    assert gradient[absent].any()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_targets_are_the_inputs_one_step_later(batch_size: int) -> None:
    _, (inputs, targets), _ = build_gpt(batch_size, config=TINY)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert inputs.untyped_storage().data_ptr() != targets.untyped_storage().data_ptr()


def test_first_loss_is_that_of_guessing() -> None:
    torch.manual_seed(0)
    model, (inputs, targets), loss_fn = build_gpt(4, config=TINY)
    loss = loss_fn(model(inputs), targets)
    assert loss.item() == pytest.approx(torch.tensor(32.0).log().item(), rel=0.05)


def test_sequence_may_be_shorter_than_the_context_but_not_longer() -> None:
    model, (inputs, _), _ = build_gpt(2, sequence=5, config=TINY)
    assert model(inputs).shape == (2, 5, 32)
    with pytest.raises(ValueError, match=r"sequence is 9 tokens, the model's context 8"):
        build_gpt(2, sequence=9, config=TINY)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        GptConfig(width=10, num_heads=3)
