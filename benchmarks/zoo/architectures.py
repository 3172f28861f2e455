"""Architectures of transformers, with random weights, whose steps take tenths of a second.

Every batch has what a tokenizer or image processor makes, `attention_mask` included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["TRANSFORMERS"]

Built = tuple[nn.Module, Any, Any]
VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS, BATCH = 512, 64, 3, 4, 128, 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "max_position_embeddings": 2 * TOKENS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * WIDTH,
    "decoder_ffn_dim": 4 * WIDTH,
    "max_position_embeddings": 2 * TOKENS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
EXPERTS: dict[str, Any] = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
SOUND: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "vocab_size": 32,
}
PICTURE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "image_size": 64,
    "patch_size": 8,
}


def _named(model: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers, in training mode as its class leaves it for training."""
    import transformers

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).train()


def _tokens(batch: int, length: int = TOKENS) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (batch, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _language(
    model: str, config: str, *, length: int = TOKENS, **settings: Any
) -> Callable[[int], Built]:
    """Predicts every token: decoders and masked encoders."""

    def build(batch_size: int = BATCH) -> Built:
        network = _named(model, config, **{**SMALL, **settings})
        batch = _tokens(batch_size, length)
        return network, {**batch, "labels": batch["input_ids"].clone()}, None

    return build


def _padded(model: str, config: str, **settings: Any) -> Callable[[int], Built]:
    """As `_language`, with sentences of different lengths."""

    def build(batch_size: int = BATCH) -> Built:
        network = _named(model, config, **{**SMALL, **settings})
        batch = _tokens(batch_size)
        for row, mask in enumerate(batch["attention_mask"]):
            mask[TOKENS - 8 * row :] = 0
        return network, {**batch, "labels": batch["input_ids"].clone()}, None

    return build


def _classifier(model: str, config: str, **settings: Any) -> Callable[[int], Built]:
    def build(batch_size: int = BATCH) -> Built:
        network = _named(model, config, **{**SMALL, "num_labels": 5, **settings})
        return network, {**_tokens(batch_size), "labels": torch.randint(5, (batch_size,))}, None

    return build


def _translator(model: str, config: str, **settings: Any) -> Callable[[int], Built]:
    def build(batch_size: int = BATCH) -> Built:
        network = _named(model, config, **{**ENCODER_DECODER, **settings})
        labels = torch.randint(3, VOCABULARY, (batch_size, TOKENS // 2))
        return network, {**_tokens(batch_size), "labels": labels}, None

    return build


def _image(
    model: str, config: str, *, size: int = 64, labels: int = 10, **settings: Any
) -> Callable[[int], Built]:
    def build(batch_size: int = BATCH) -> Built:
        network = _named(model, config, num_labels=labels, **settings)
        images = torch.randn(batch_size, 3, size, size)
        return (
            network,
            {"pixel_values": images, "labels": torch.randint(labels, (batch_size,))},
            None,
        )

    return build


def _segmenter(model: str, config: str, **settings: Any) -> Callable[[int], Built]:
    def build(batch_size: int = 4) -> Built:
        network = _named(model, config, num_labels=5, **settings)
        images = torch.randn(batch_size, 3, 64, 64)
        labels = torch.randint(5, (batch_size, 64, 64))
        return network, {"pixel_values": images, "labels": labels}, None

    return build


def _listener(model: str, config: str, **settings: Any) -> Callable[[int], Built]:
    """Raw sound to letters, by connectionist temporal classification."""

    def build(batch_size: int = 4) -> Built:
        network = _named(model, config, **{**SOUND, **settings})
        sound = torch.randn(batch_size, 4000)
        labels = torch.randint(1, 32, (batch_size, 8))
        return network, {"input_values": sound, "labels": labels}, None

    return build


def _whisper(batch_size: int = 4) -> Built:
    settings = {**ENCODER_DECODER, "num_mel_bins": 40, "max_source_positions": 100}
    settings |= {"max_target_positions": 64, "suppress_tokens": [], "begin_suppress_tokens": []}
    network = _named("WhisperForConditionalGeneration", "WhisperConfig", **settings)
    sound = torch.randn(batch_size, 40, 200)
    labels = torch.randint(3, VOCABULARY, (batch_size, 32))
    return network, {"input_features": sound, "labels": labels}, None


def _speech_to_text(batch_size: int = 4) -> Built:
    settings = {**ENCODER_DECODER, "input_feat_per_channel": 40, "conv_channels": 64}
    settings |= {"max_source_positions": 200, "max_target_positions": 64}
    network = _named("Speech2TextForConditionalGeneration", "Speech2TextConfig", **settings)
    labels = torch.randint(3, VOCABULARY, (batch_size, 32))
    sound = torch.randn(batch_size, 200, 40)
    mask = torch.ones(batch_size, 200, dtype=torch.long)
    return network, {"input_features": sound, "attention_mask": mask, "labels": labels}, None


def _spectrogram(batch_size: int = 4) -> Built:
    settings = {**PICTURE, "num_mel_bins": 32, "max_length": 128, "num_labels": 5}
    network = _named("ASTForAudioClassification", "ASTConfig", **settings)
    sound = torch.randn(batch_size, 128, 32)
    return network, {"input_values": sound, "labels": torch.randint(5, (batch_size,))}, None


def _clip(batch_size: int = BATCH) -> Built:
    text = {**SMALL, "max_position_embeddings": TOKENS}
    settings = {"text_config": text, "vision_config": PICTURE, "projection_dim": 32}
    network = _named("CLIPModel", "CLIPConfig", **settings)
    images = torch.randn(batch_size, 3, 64, 64)
    batch = {**_tokens(batch_size, 32), "pixel_values": images, "return_loss": True}
    return network, batch, None


def _vilt(batch_size: int = 4) -> Built:
    network = _named("ViltForQuestionAnswering", "ViltConfig", **{**SMALL, **PICTURE}, num_labels=5)
    images = torch.randn(batch_size, 3, 64, 64)
    mask = torch.ones(batch_size, 64, 64, dtype=torch.long)
    batch = {**_tokens(batch_size, 32), "pixel_values": images, "pixel_mask": mask}
    return network, {**batch, "labels": torch.rand(batch_size, 5)}, None


def _patches_of_time(model: str, config: str, **settings: Any) -> Callable[[int], Built]:
    def build(batch_size: int = 16) -> Built:
        settings_ = {"num_input_channels": 4, "context_length": 128, "prediction_length": 16}
        network = _named(model, config, **settings_, **settings)
        past, future = torch.randn(batch_size, 128, 4), torch.randn(batch_size, 16, 4)
        return network, {"past_values": past, "future_values": future}, None

    return build


def _video(batch_size: int = 2) -> Built:
    settings = {**PICTURE, "num_frames": 4, "num_labels": 5}
    network = _named("TimesformerForVideoClassification", "TimesformerConfig", **settings)
    frames = torch.randn(batch_size, 4, 3, 64, 64)
    return network, {"pixel_values": frames, "labels": torch.randint(5, (batch_size,))}, None


# Without kernels of their own these go through a sentence token by token.
_MAMBA = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8}

# By family, then by model.
TRANSFORMERS: dict[str, dict[str, Callable[..., Built]]] = {
    "encoder": {
        "bert": _language("BertForMaskedLM", "BertConfig"),
        "bert-padded": _padded("BertForMaskedLM", "BertConfig"),
        "roberta": _classifier("RobertaForSequenceClassification", "RobertaConfig"),
        "distilbert": _classifier(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            dim=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            hidden_dim=4 * WIDTH,
        ),
        "albert": _classifier("AlbertForSequenceClassification", "AlbertConfig", embedding_size=32),
        "electra": _classifier("ElectraForSequenceClassification", "ElectraConfig"),
        "deberta-v2": _classifier("DebertaV2ForSequenceClassification", "DebertaV2Config"),
        "modernbert": _language("ModernBertForMaskedLM", "ModernBertConfig"),
        "fnet": _language("FNetForMaskedLM", "FNetConfig"),
        "mpnet": _classifier("MPNetForSequenceClassification", "MPNetConfig"),
        "convbert": _classifier("ConvBertForSequenceClassification", "ConvBertConfig"),
    },
    "decoder": {
        "gpt2": _language("GPT2LMHeadModel", "GPT2Config"),
        "llama": _language("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2),
        "llama-padded": _padded("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2),
        "mistral": _language("MistralForCausalLM", "MistralConfig", num_key_value_heads=2),
        "qwen3": _language("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=16),
        "gemma3": _language(
            "Gemma3ForCausalLM", "Gemma3TextConfig", num_key_value_heads=2, head_dim=16
        ),
        "phi3": _language("Phi3ForCausalLM", "Phi3Config", num_key_value_heads=2),
        "opt": _language(
            "OPTForCausalLM", "OPTConfig", ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH
        ),
        "bloom": _language("BloomForCausalLM", "BloomConfig", n_layer=LAYERS, n_head=HEADS),
        "gpt-neox": _language("GPTNeoXForCausalLM", "GPTNeoXConfig"),
        "falcon": _language("FalconForCausalLM", "FalconConfig"),
        "olmo2": _language("Olmo2ForCausalLM", "Olmo2Config"),
    },
    "encoder-decoder": {
        "t5": _translator(
            "T5ForConditionalGeneration",
            "T5Config",
            d_ff=4 * WIDTH,
            num_layers=2,
            num_heads=HEADS,
            d_kv=16,
        ),
        "bart": _translator("BartForConditionalGeneration", "BartConfig"),
        "marian": _translator("MarianMTModel", "MarianConfig"),
        "m2m-100": _translator("M2M100ForConditionalGeneration", "M2M100Config"),
        "pegasus": _translator("PegasusForConditionalGeneration", "PegasusConfig"),
    },
    "vision transformer": {
        "vit": _image("ViTForImageClassification", "ViTConfig", **PICTURE),
        "deit": _image("DeiTForImageClassification", "DeiTConfig", **PICTURE),
        "beit": _image("BeitForImageClassification", "BeitConfig", **PICTURE),
        "dinov2": _image("Dinov2ForImageClassification", "Dinov2Config", **PICTURE),
        "swin": _image(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=64,
            patch_size=2,
            embed_dim=24,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        "pvt-v2": _image(
            "PvtV2ForImageClassification",
            "PvtV2Config",
            image_size=64,
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 32, 64, 64],
            num_attention_heads=[1, 2, 4, 4],
        ),
        "mobilevit": _image(
            "MobileViTForImageClassification",
            "MobileViTConfig",
            image_size=64,
            hidden_sizes=[24, 32, 48],
            neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 96],
        ),
    },
    "convolutional": {
        "resnet": _image(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[32, 64, 96, 128],
            depths=[1, 1, 1, 1],
        ),
        "convnext": _image(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[16, 32, 64, 96],
            depths=[1, 1, 2, 1],
            drop_path_rate=0.1,
        ),
        "regnet": _image(
            "RegNetForImageClassification",
            "RegNetConfig",
            embedding_size=16,
            hidden_sizes=[32, 32, 64, 64],
            depths=[1, 1, 1, 1],
            groups_width=16,
        ),
        "mobilenet-v2": _image(
            "MobileNetV2ForImageClassification",
            "MobileNetV2Config",
            depth_multiplier=0.35,
            image_size=64,
        ),
        "efficientnet": _image(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            width_coefficient=0.25,
            depth_coefficient=0.3,
            hidden_dim=320,
            image_size=64,
        ),
        "poolformer": _image(
            "PoolFormerForImageClassification",
            "PoolFormerConfig",
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 32, 48, 64],
        ),
    },
    "segmentation": {
        "segformer": _segmenter(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 32, 48, 64],
            num_attention_heads=[1, 2, 3, 4],
            decoder_hidden_size=64,
        ),
        "mobilevit-deeplab": _segmenter(
            "MobileViTForSemanticSegmentation",
            "MobileViTConfig",
            image_size=64,
            hidden_sizes=[24, 32, 48],
            neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 96],
            aspp_out_channels=32,
        ),
    },
    "speech": {
        "wav2vec2": _listener("Wav2Vec2ForCTC", "Wav2Vec2Config"),
        "hubert": _listener("HubertForCTC", "HubertConfig"),
        "whisper": _whisper,
        "speech-to-text": _speech_to_text,
        "spectrogram": _spectrogram,
    },
    "state-space": {
        "mamba": _language("MambaForCausalLM", "MambaConfig", length=24, **_MAMBA),
        "mamba2": _language(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            **_MAMBA,
            num_heads=8,
            head_dim=16,
            n_groups=2,
            chunk_size=32,
        ),
        "falcon-mamba": _language(
            "FalconMambaForCausalLM", "FalconMambaConfig", length=24, **_MAMBA
        ),
        "recurrent-gemma": _language(
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            lru_width=WIDTH,
            num_key_value_heads=1,
            attention_window_size=64,
        ),
    },
    "mixture of experts": {
        "mixtral": _language("MixtralForCausalLM", "MixtralConfig", **EXPERTS, num_local_experts=4),
        "qwen3-moe": _language(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **EXPERTS,
            num_experts=4,
            moe_intermediate_size=WIDTH,
            head_dim=16,
        ),
        "olmoe": _language("OlmoeForCausalLM", "OlmoeConfig", **EXPERTS, num_experts=4),
        "gpt-oss": _language(
            "GptOssForCausalLM", "GptOssConfig", **EXPERTS, num_local_experts=4, head_dim=16
        ),
        "deepseek-v3": _language(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            num_experts_per_tok=2,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=WIDTH,
            kv_lora_rank=16,
            q_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            first_k_dense_replace=1,
            num_key_value_heads=4,
        ),
    },
    "text and pictures": {"clip": _clip, "vilt": _vilt},
    "time series": {
        "patchtst": _patches_of_time(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            d_model=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            ffn_dim=4 * WIDTH,
            patch_length=8,
            patch_stride=4,
        ),
        "patchtsmixer": _patches_of_time(
            "PatchTSMixerForPrediction",
            "PatchTSMixerConfig",
            d_model=32,
            num_layers=3,
            patch_length=8,
            patch_stride=8,
        ),
    },
    "video": {"timesformer": _video},
}
