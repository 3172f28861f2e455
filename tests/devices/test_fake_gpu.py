"""The operators that torch chooses for a GPU that is not there."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import bayplan
from bayplan import capture, check
from bayplan.costing.catalogue import device_names, load_device
from bayplan.data.device import DeviceKind
from bayplan.data.errors import CaptureError, ForeignPlan, UsageError
from bayplan.devices import fake_gpu
from bayplan.models.gpt import GptConfig, build_gpt
from bayplan.preparing.sources import prepare
from bayplan.rewriting.repeats import draw
from bayplan.running.ranks.rank_step import check_fingerprint

pytestmark = pytest.mark.skipif(
    bool(fake_gpu.why_no_fake_gpu()), reason="no GPU can be faked without a C++ compiler"
)


class Attention(nn.Module):
    def __init__(self, *, head: int = 64, dropout: float = 0.0, dtype=torch.float16, **options):
        super().__init__()
        self.project, self.head = nn.Linear(32, 4 * head), head
        self.dropout, self.dtype, self.options = dropout, dtype, options

    def forward(self, tokens):
        heads = self.project(tokens).unflatten(-1, (4, self.head)).transpose(1, 2).to(self.dtype)
        mask = torch.ones(8, 8, dtype=torch.bool, device=tokens.device)
        options = dict(self.options)
        if options.pop("is_odd", False):  # rows that begin between CUTLASS's units
            heads = functional.pad(heads.flatten(), (1, 0))[1:].view(heads.shape)
        if options.pop("masked", False):
            options["attn_mask"] = mask
        mixed = functional.scaled_dot_product_attention(
            heads, heads, heads, dropout_p=self.dropout, **options
        )
        return mixed.float().sum()


def kernel(module: nn.Module, device: str) -> str:
    graph = capture(module, torch.ones(2, 8, 32), device=device)
    kinds = ("flash", "efficient", "cudnn")
    names = [node.op for node in graph.nodes]
    chosen = [kind for kind in kinds if any(f"dot_product_{kind}_att" in name for name in names)]
    backward = [kind for kind in kinds if any(f"{kind}_attention_backward" in n for n in names)]
    assert chosen == backward
    return chosen[0] if chosen else "math"


@pytest.mark.parametrize(
    ("device", "options", "chosen"),
    [
        ("h100", {}, "cudnn"),
        ("h100", {"dropout": 0.1}, "flash"),  # cuDNN drops sixteenths only
        ("h100", {"dropout": 0.125}, "cudnn"),
        ("h100", {"masked": True, "dropout": 0.1}, "efficient"),
        ("h100", {"dtype": torch.float32}, "efficient"),
        ("h100", {"dtype": torch.float64}, "math"),
        ("h100", {"head": 264, "dtype": torch.bfloat16}, "efficient"),
        ("mi300x", {}, "flash"),
        ("a100", {}, "flash"),
        ("a100", {"head": 36}, "flash"),
        ("a100", {"head": 36, "masked": True}, "math"),  # not a multiple of eight
        ("a100", {"masked": True}, "efficient"),
        ("a100", {"masked": True, "is_odd": True}, "math"),
        ("v100", {"is_odd": True}, "efficient"),  # where it is not asked for
        ("rtx-4090", {"head": 200}, "efficient"),  # too little shared memory for its backward
        ("rtx-4090", {"head": 192}, "flash"),
        ("v100", {}, "efficient"),
        ("v100", {"dtype": torch.bfloat16}, "math"),
        ("p100", {"dtype": torch.float32, "head": 33}, "efficient"),
        ("t4", {"dtype": torch.float32}, "efficient"),
    ],
)
def test_attention_follows_the_rules_of_torch(device, options, chosen):
    assert kernel(Attention(**options), device) == chosen


def test_cudnn_takes_65535_rows_at_most():
    def chosen(num_rows: int) -> str:
        graph = capture(Attention(head=8), torch.ones(num_rows, 2, 32), device="h100")
        return next(node.op for node in graph.nodes if "dot_product" in node.op)

    assert "cudnn" in chosen(65535)
    assert "flash" in chosen(65536)


def test_kernels_that_are_switched_off_are_not_chosen():
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert kernel(Attention(), "h100") == "math"


def test_attention_that_a_gpu_is_too_old_for_is_refused():
    with (
        nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION),
        pytest.raises(CaptureError, match=r"compute capability 7\.0"),
    ):
        kernel(Attention(), "v100")


class Mixed(nn.Module):
    """What CUDA has operators of its own for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.dropout, self.lstm = nn.Dropout(0.1), nn.LSTM(16, 8, 2, dropout=0.2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, images):
        rows = self.dropout(torch.relu(self.norm(self.conv(images)))).flatten(2).transpose(1, 2)
        heads = rows.contiguous().unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        rows = mixed.transpose(1, 2).flatten(2)
        return self.gru(self.lstm(rows)[0])[0].sum()


WHOLE = (
    *("cudnn_batch_norm", "cudnn_batch_norm_backward", "_cudnn_rnn", "_cudnn_rnn_backward"),
    *("native_dropout", "native_dropout_backward"),
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
)


@pytest.fixture(scope="module")
def mixed():
    return prepare(Mixed(), torch.randn(2, 3, 8, 8), optimizer="adamw", device="a100")


def test_capture_has_operators_of_cuda(mixed):
    names = {node.op.split(".")[1] for node in mixed.graph.nodes}
    assert names.issuperset(WHOLE)
    assert any(name.startswith("_foreach_") for name in names)


def test_joint_graph_keeps_operators_whole_and_draws_with_a_state(mixed):
    step = mixed.traced.with_packs()
    nodes = [node for node in step.op_nodes if node is not None]
    called = [node.args[0] if node.target is draw else node.target for node in nodes]
    names = {getattr(target, "__name__", "").split(".")[0] for target in called}
    assert names.issuperset(WHOLE)
    drawn = {node.args[0].__name__.split(".")[0] for node in nodes if node.target is draw}
    assert drawn.issuperset({"native_dropout", "_scaled_dot_product_efficient_attention"})


def test_recurrent_layers_that_drop_are_not_repeated(mixed):
    program = mixed.traced.with_packs().program
    repeatable = {op.name: op.can_repeat for op in program.ops if "_cudnn_rnn" in op.name}
    assert len(repeatable) == 4
    assert not all(repeatable.values())


def test_seed_of_efficient_attention_with_dropout_is_on_the_host(mixed):
    nodes = [node for node in mixed.traced.with_packs().op_nodes if node is not None]
    name = "_scaled_dot_product_efficient_attention.default"
    (attention,) = (n for n in nodes if n.target is draw and n.args[0].__name__ == name)
    output, _, seed, offset = attention.meta["val"]
    assert (output.device.type, seed.device.type, offset.device.type) == ("cuda", "cpu", "cpu")


def test_lstm_keeps_what_cudnn_says_it_keeps():
    # cudnnGetRNNTempSpaceSizes of cuDNN 9.20 for 10 steps of 4 samples, 64 units and 2 layers.
    lstm = nn.LSTM(32, 64, 2)
    graph = capture(lstm, torch.ones(10, 4, 32), lambda output: output[0].sum(), device="a100")
    (node,) = (node for node in graph.nodes if node.op == "aten._cudnn_rnn.default")
    sizes = [graph.values[value].size_bytes for value in node.writes]
    assert 112896 in sizes
    assert node.flops == 2 * 40 * sum(w.numel() for w in lstm.parameters() if w.dim() == 2)


class Deciding(nn.Module):
    """Makes constants on its device, and decides by its batch, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.Linear(4, 4), nn.GRUCell(4, 4)

    def forward(self, rows, mask):
        empty = torch.tensor([], dtype=rows.dtype, device=rows.device)
        rows = torch.cat([empty, rows.flatten()]).view(rows.shape)
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device=rows.device)
        if (~mask | torch.zeros(2, 6, dtype=torch.bool, device=rows.device)).any():
            rows = self.layer(rows) * scale
        return self.cell(rows)


def test_models_that_decide_and_make_constants_are_planned_as_on_the_host():
    masks, num_ops = torch.ones(2, 6, dtype=torch.bool), []
    for mask in (masks, masks.tril()):
        step = prepare(Deciding(), (torch.ones(2, 4), mask), lambda made: made.sum(), device="a100")
        num_ops.append(len(step.traced.with_packs().program.ops))
        assert len([node for node in step.graph.nodes if "gru_cell" in node.op]) == 2
    assert num_ops[0] < num_ops[1]  # the second mask decides for one layer more


class Aligning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, rows):
        told = self.layer(rows).log_softmax(-1)
        lengths = torch.full((2,), 6), torch.full((2,), 3)
        targets = torch.ones(2, 3, dtype=torch.long, device=rows.device)
        return functional.ctc_loss(told, targets, *lengths)


def test_operators_that_torch_has_no_rule_for_are_looked_at_on_the_host():
    graph = capture(Aligning(), torch.ones(6, 2, 8), device="h100", optimizer=fused_sgd)
    names = {node.op.split(".")[1] for node in graph.nodes}
    assert names.issuperset({"_ctc_loss", "_ctc_loss_backward", "_fused_sgd_"})
    assert "_cudnn_ctc_loss" not in names


def fused_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def test_torch_looks_as_before_outside_of_a_capture():
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()  # the engine has started, without any GPU
    before = torch.cuda.is_available(), torch.accelerator.is_available()
    capture(model, torch.ones(2, 4), lambda y: y.sum(), device="h100", autocast="bf16")
    assert (torch.cuda.is_available(), torch.accelerator.is_available()) == before
    assert torch.cuda.is_bf16_supported() == before[0]
    assert model.weight.device.type == "cpu"
    model(torch.ones(2, 4)).sum().backward()


def test_strides_of_the_model_are_kept():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    weight = model[0].weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    images = torch.ones(2, 8, 8, 8).to(memory_format=torch.channels_last)
    step = prepare(model, images, lambda y: (y * y).sum(), device="h100")
    names = [node.op for node in step.graph.nodes]
    assert "aten.clone.default" not in names


def test_gpt_with_dropout_needs_what_its_cuda_graph_needs():

    def build(batch_size: int = 4):
        return build_gpt(batch_size, config=GptConfig(dropout=0.1))

    from bayplan.models.targets import Target
    from bayplan.preparing.step import PreparedStep

    target = Target(name="gpt", build=build, takes_batch_size=True, default_batch=4)
    kind = load_device("h100")
    for autocast, expected_mib in (("none", 6971), ("bf16", 5800)):
        step = PreparedStep(target=target, device=kind, autocast=autocast)
        assert step.simulated().peak_bytes / 2**20 == pytest.approx(expected_mib, rel=0.001)


def test_builder_may_put_its_model_on_cuda():
    """As scripts for a GPU do. It worked on no build of torch without a GPU."""
    from bayplan.models.targets import Target
    from bayplan.preparing.step import PreparedStep

    def build(batch_size: int = 2):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
        return model, torch.randn(batch_size, 3, 32, 32).to("cuda"), lambda output: output.sum()

    target = Target(name="cuda", build=build, takes_batch_size=True, default_batch=2)
    step = PreparedStep(target=target, device=load_device("h100"))
    larger = step.at(4)
    for each in (step, larger):
        assert "aten.cudnn_batch_norm.default" in {node.op for node in each.graph.nodes}
    assert larger.simulated().peak_bytes > step.simulated().peak_bytes


class Asking(nn.Module):
    """Mixtures of experts of transformers ask so, and code for one GPU names it by its number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        torch.cuda.synchronize()
        major, minor = torch.cuda.get_device_capability(x.device)
        x = x + torch.full((4,), 10 * major + minor, device=torch.cuda.current_device())
        return self.linear(x) if (major, minor) >= (8, 0) else self.linear(x).relu()


@pytest.mark.parametrize(("device", "is_old"), [("h100", False), ("t4", True)])
def test_models_that_ask_which_gpu_they_are_on_are_told(device, is_old):
    step = prepare(Asking(), torch.ones(2, 4), lambda y: y.sum(), device=device)
    assert ("aten.relu.default" in {node.op for node in step.graph.nodes}) == is_old
    assert any("relu" in op.name for op in step.traced.with_packs().program.ops) == is_old


def test_experts_of_transformers_are_captured():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    ids = {"input_ids": torch.ones(2, 8, dtype=torch.int64)}
    step = prepare(model, ids, lambda output: output.logits.sum(), device="a100")
    assert any("grouped_mm" in node.op for node in step.graph.nodes)


@pytest.mark.parametrize("name", ["resnet50", "alexnet", "vgg16"])
def test_models_without_dropout_between_layers_need_what_they_needed(name):
    peaks = [
        prepare(
            name, 4, device="h100", optimizer="adamw", operators=None if own else ""
        ).simulated()
        for own in (True, False)
    ]
    assert peaks[0].peak_bytes == pytest.approx(peaks[1].peak_bytes, rel=0.001)


def test_stages_of_a_cluster_have_the_operators_of_its_gpus(own_planner_cache):
    options = GptConfig(
        num_layers=2, width=64, num_heads=2, vocabulary=128, context=256, dropout=0.1
    )
    model, batch, loss = build_gpt(8, config=options)
    half = [tensor[:4] for tensor in batch]
    plan = bayplan.plan(
        model, batch, loss, cluster="dgx-h100", placement="0:0-1", optimizer="adamw"
    )
    halved = prepare(model, half, loss, device="h100", optimizer="adamw")
    assert plan.predicted_peak_bytes[0] == pytest.approx(halved.simulated().peak_bytes, rel=0.1)
    on_cpu = halved.changed(operators="").simulated().peak_bytes
    assert on_cpu > 1.5 * halved.simulated().peak_bytes


def test_a_plan_for_a_cluster_is_simulated_with_its_operators_and_refused_by_others(
    own_planner_cache,
):
    plan = bayplan.plan("resnet18", 8, cluster="dgx-a100", placement="0:0-1", optimizer="sgd")
    assert plan.request.operators == "sm_80"
    assert bayplan.simulate(plan, cluster="titanv-8").devices[0].peak_bytes > 0
    with pytest.raises(ForeignPlan, match=r"operators of its cluster's GPUs \(sm_80\)"):
        check_fingerprint(plan, "that of the CPU's")


@pytest.mark.parametrize(
    ("architectures", "oldest"),
    [
        (["sm_90", "sm_70", "sm_80"], "sm_70"),
        (["sm_90", "gfx942"], "gfx942"),
        (["sm_90", "sm_100"], "sm_90"),
        (["sm_90", ""], ""),
        ([], ""),
    ],
)
def test_oldest_architecture_of_a_cluster(architectures, oldest):
    assert fake_gpu.FakeGpu.oldest(architectures) == oldest


def test_bfloat16_on_a_gpu_that_has_none_is_refused():
    with pytest.raises(UsageError, match="use --autocast fp16"):
        capture(
            nn.Linear(2, 2), torch.ones(1, 2), lambda y: y.sum(), device="v100", autocast="bf16"
        )


def test_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match="on 2 devices"):
        capture(model, torch.ones(1, 2), lambda y: y.sum(), device="h100")


def test_model_on_meta_is_captured_as_on_the_gpu():
    model = nn.Linear(2, 2, device="meta")
    assert capture(model, torch.ones(1, 2), lambda y: y.sum(), device="h100").nodes


def test_without_a_library_cpu_operators_stand_in_and_the_verdict_says_so(monkeypatch):
    monkeypatch.setattr("bayplan.preparing.step.why_no_fake_gpu", lambda: "no C++ compiler")
    verdict = check(nn.Linear(2, 2), torch.ones(1, 2), lambda y: y.sum(), device="h100")
    assert "CPU operators stand in" in verdict.operators_note
    assert "no C++ compiler" in verdict.operators_note


def test_device_that_is_no_nvidia_gpu_says_what_is_assumed():
    verdict = check(nn.Linear(2, 2), torch.ones(1, 2), lambda y: y.sum(), device="mi300x")
    assert "HIP" in verdict.operators_note


def test_all_devices_of_the_catalogue_say_their_architecture():
    assert all(load_device(name).architecture for name in device_names())


def test_architecture_that_nobody_knows_is_refused():
    kind = load_device("h100")
    fields = {name: getattr(kind, name) for name in DeviceKind.__struct_fields__}
    with pytest.raises(ValueError, match="must be NVIDIA's like sm_90"):
        DeviceKind(**fields | {"architecture": "hopper"})
