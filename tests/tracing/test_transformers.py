"""Models of the transformers library, one of each family, captured as they really run."""

import pytest
import torch

import bayplan
from bayplan.data.graph import StorageKind
from bayplan.data.source import short_path

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH, HEADS = 50, 16, 2


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(2, (2,))}


def build_bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config), tokens()


def build_gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=1,
        n_head=HEADS,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config), tokens()


def build_llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=32,
    )
    return transformers.LlamaForCausalLM(config), tokens()


def build_t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), tokens()


def build_vit():
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
    )
    return transformers.ViTForImageClassification(config), pixels()


@pytest.mark.parametrize("build", [build_bert, build_gpt2, build_llama, build_t5, build_vit])
def test_capture_is_the_real_step(same_as_real, build):
    model, batch = build()
    model.train()
    graph = same_as_real(model, batch, optimizer=torch.optim.AdamW)
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    assert any("modeling_" in node.source for node in graph.nodes)


def test_tied_embedding_and_head_are_one_storage():
    model, batch = build_gpt2()
    graph = bayplan.capture(model, batch)
    names = [s.name for s in graph.storages if s.kind is StorageKind.PARAMETER]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    head = [node for node in graph.nodes if node.module == "lm_head"]
    embedding = [node for node in graph.nodes if node.module == "transformer.wte"]
    assert {graph.values[v].storage for n in head for v in n.reads} & {
        graph.values[v].storage for n in embedding for v in n.reads
    }


def test_gradient_checkpointing_of_the_library(same_as_real):
    model, batch = build_vit()
    model.gradient_checkpointing_enable()
    same_as_real(model.train(), batch)


def test_built_without_memory_is_the_same():
    with torch.device("meta"):
        model, batch = build_llama()
    real_model, real_batch = build_llama()
    assert bayplan.capture(model, batch) == bayplan.capture(real_model, real_batch)


def test_lines_are_of_the_files_that_the_models_modules_are_in():
    model, batch = build_gpt2()
    files = {node.source.rsplit(":")[0] for node in bayplan.capture(model, batch).nodes}
    assert files <= {
        *("gpt2/modeling_gpt2.py", "transformers/pytorch_utils.py", "transformers/activations.py"),
        "",
    }


def test_line_of_the_user_that_calls_a_librarys_model_comes_first():
    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, _ = build_gpt2()

        def forward(self, **batch):
            return self.backbone(**batch)

    graph = bayplan.capture(Mine(), tokens())
    files = {node.source.rsplit(":")[0] for node in graph.nodes}
    assert files == {short_path(__file__), ""}
