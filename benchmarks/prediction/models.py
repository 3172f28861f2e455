"""The models of this benchmark: ours by name, and transformers models with small configurations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bayplan.models import load

__all__ = ["MODELS", "Case"]

Built = tuple[nn.Module, Any, Any]
SEQUENCE = 128
VOCABULARY = 2000


class Case:
    """A model, the batch to predict, the batch to profile, and its optimizer."""

    def __init__(
        self, build: Callable[[int], Built], batch: int, optimizer: Callable[..., Any]
    ) -> None:
        self.build, self.batch, self.optimizer = build, batch, optimizer


def _language(make: Callable[[Any], nn.Module], config: Any, batch: int) -> Built:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (batch, SEQUENCE))
    return make(config()).train(), {"input_ids": tokens, "labels": tokens.clone()}, None


def _bert(batch: int) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = partial(
        BertConfig,
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    return _language(BertForMaskedLM, config, batch)


def _gpt2(batch: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = partial(
        GPT2Config,
        vocab_size=VOCABULARY,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language(GPT2LMHeadModel, config, batch)


def _llama(batch: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = partial(
        LlamaConfig,
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=704,
    )
    return _language(LlamaForCausalLM, config, batch)


def _t5(batch: int) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = partial(
        T5Config,
        vocab_size=VOCABULARY,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=3,
        num_heads=4,
        # Configurations take more than they declare.
        decoder_start_token_id=0,  # pyrefly: ignore[unexpected-keyword]
    )
    return _language(T5ForConditionalGeneration, config, batch)


def _albert(batch: int) -> Built:
    """Dropout, tied weights, and all layers sharing one set of parameters."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = partial(
        AlbertConfig,
        vocab_size=VOCABULARY,
        embedding_size=128,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return _language(AlbertForMaskedLM, config, batch)


def _vit(batch: int) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        image_size=128,
    )
    images = torch.randn(batch, 3, 128, 128)
    labels = torch.randint(0, 2, (batch,))
    model = ViTForImageClassification(config).train()
    return model, {"pixel_values": images, "labels": labels}, None


def _ours(name: str, batch: int, **settings: Any) -> Built:
    torch.manual_seed(0)
    return load(name)(batch, **settings)


_SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
_ADAMW = partial(torch.optim.AdamW, lr=1e-4)

MODELS: dict[str, Case] = {
    "alexnet": Case(partial(_ours, "alexnet"), 96, _SGD),
    "vgg16": Case(partial(_ours, "vgg16"), 10, _SGD),
    "resnet50": Case(partial(_ours, "resnet50"), 8, _SGD),
    "resnet152": Case(partial(_ours, "resnet152"), 6, _SGD),
    "inception_v4": Case(partial(_ours, "inception_v4"), 6, _SGD),
    "gpt": Case(partial(_ours, "gpt", sequence=256), 4, _ADAMW),
    "transformers-bert": Case(_bert, 32, _ADAMW),
    "transformers-gpt2": Case(_gpt2, 32, _ADAMW),
    "transformers-llama": Case(_llama, 32, _ADAMW),
    "transformers-t5": Case(_t5, 24, _ADAMW),
    "transformers-vit": Case(_vit, 64, _ADAMW),
    "transformers-albert": Case(_albert, 32, _ADAMW),
}
