"""What goes wrong in a model is told by the user's line, with what to do."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import bayplan
from bayplan.data.errors import CaptureError, DoesNotFit, ExitCode, UsageError
from bayplan.tracing.explain import explained, out_of_memory, users_traceback
from bayplan.tracing.fake import build_without_memory

HERE = Path(__file__).name
X = torch.ones(3000, 4)  # large enough that no capture knows its values


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


class Model(nn.Module):
    """A linear layer whose forward does what the test wants."""

    def __init__(self, forward):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.do = forward

    def forward(self, x):
        return self.do(self.linear, x)


def error_of(forward) -> str:
    """Of a model that has no values: one that has them is captured with all of its forward's."""
    model = build_without_memory(partial(Model, forward))
    with pytest.raises(CaptureError) as caught:
        bayplan.capture(model, X, total)
    return str(caught.value)


def place(message: str) -> str:
    """The source text that a message names, after a check of its file and line."""
    found = re.search(rf"{re.escape(HERE)}:(\d+) \(`(.*?)`\)", message)
    assert found, message
    text = Path(__file__).read_text().splitlines()[int(found[1]) - 1]
    assert text.strip() == found[2]
    return found[2]


# Values that decide.


def branch_on_value(linear, x):
    if x.sum() > 0:
        return linear(x)
    return x


def read_item(linear, x):
    scale = x.sum().item()
    return linear(x) * scale


def call_float(linear, x):
    return linear(x) * float(x.mean())


def find_nonzero(linear, x):
    return linear(x)[x.nonzero()]


def select_by_mask(linear, x):
    return linear(x)[x > 0]


def make_list(linear, x):
    return linear(x) * x.tolist()[0][0]


def make_array(linear, x):
    return linear(x) + torch.from_numpy(x.numpy())


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (branch_on_value, "if x.sum() > 0:"),
        (read_item, "scale = x.sum().item()"),
        (call_float, "return linear(x) * float(x.mean())"),
        (find_nonzero, "return linear(x)[x.nonzero()]"),
        (select_by_mask, "return linear(x)[x > 0]"),
        (make_list, "return linear(x) * x.tolist()[0][0]"),
        (make_array, "return linear(x) + torch.from_numpy(x.numpy())"),
    ],
)
def test_needing_a_value_names_the_line_and_the_way_out(forward, line):
    message = error_of(forward)
    assert place(message) == line
    assert "needs a tensor's value, which is not known before the step runs" in message
    assert "torch.where" in message


class BranchingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if gradient.sum() > 0:
            return gradient * 2
        return gradient


def test_needing_a_value_in_a_custom_backward():
    message = error_of(lambda linear, x: BranchingBackward.apply(linear(x)))
    assert place(message) == "if gradient.sum() > 0:"


def test_sparse_tensors_are_refused():
    def make_sparse(linear, x):
        return linear(x).to_sparse().to_dense()

    message = error_of(make_sparse)
    assert f"{HERE}:" in message
    assert "makes a tensor of layout torch.sparse_coo" in message
    embedding = nn.Embedding(5, 4, sparse=True)
    with pytest.raises(CaptureError, match=r"layout torch.sparse_coo.*sparse=False"):
        bayplan.capture(embedding, torch.tensor([1, 2]), total)


def pack(linear, x):
    lengths = torch.tensor([2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(linear(x).view(2, -1, 4), lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(packed)[0]


def nest(linear, x):
    return linear(torch.nested.nested_tensor([x[:2], x[:3]], layout=torch.jagged)).values()


def nest_strided(linear, x):
    return torch.nested.to_padded_tensor(torch.nested.nested_tensor([linear(x)]), 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (pack, "packs sequences, whose memory depends on their lengths.*`gather`"),
        # The model was blamed, or a fake implementation asked for.
        (nest, "makes a nested tensor.*padded tensors and a mask"),
        (nest_strided, "makes a nested tensor.*padded tensors and a mask"),
    ],
)
def test_what_depends_on_lengths_is_refused_for_them(forward, reason):
    message = error_of(forward)
    assert re.search(reason, message)
    assert place(message)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_batches_are_refused_before_anything_runs(layout):
    # torch ended the process where such a tensor was copied without its memory.
    batch = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    with pytest.raises(UsageError, match=r"a nested tensor.*to_padded_tensor"):
        bayplan.check(nn.Linear(4, 4), batch, lambda output: output.values().sum(), memory="1GiB")


def test_sparse_buffers_are_named():
    model = nn.Linear(4, 4)
    model.register_buffer("neighbours", torch.eye(4).to_sparse())
    model.forward = lambda input: torch.sparse.mm(model.neighbours, input @ model.weight)
    with pytest.raises(CaptureError, match=r"sparse tensor, of the model.*index_add"):
        bayplan.capture(model, torch.ones(4, 4), total)


def test_operator_without_a_fake_kernel():
    with torch.library._scoped_library("bayplan_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x + 1, "CPU")

        def call_mystery(linear, x):
            return linear(x) + torch.ops.bayplan_test.mystery(x)

        message = error_of(call_mystery)
    assert place(message) == "return linear(x) + torch.ops.bayplan_test.mystery(x)"
    assert "bayplan_test.mystery.default" in message
    assert "torch.library.register_fake" in message


@torch.library.custom_op("bayplan_test::secret", mutates_args=())
def secret(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_custom_operator_without_a_fake_kernel():
    """torch says it in a plain RuntimeError, which looks like a mistake of the model's."""

    def call_secret(linear, x):
        return linear(x) + secret(x)

    message = error_of(call_secret)
    assert place(message) == "return linear(x) + secret(x)"
    assert "the operator bayplan_test::secret" in message
    assert "torch.library.register_fake" in message


def test_failure_inside_a_library_names_the_users_line_or_else_the_librarys(install):
    library = install("def decide(linear, x):\n    return linear(x) * x.sum().item()\n")

    def ask_library(linear, x):
        return library.decide(linear, x)

    assert place(error_of(ask_library)) == "return library.decide(linear, x)"
    model, inner = (build_without_memory(partial(nn.Linear, 4, 4)) for _ in range(2))
    model.forward = partial(library.decide, inner)
    with pytest.raises(CaptureError, match=r"^site-packages/library.py:2 \(`return linear"):
        bayplan.capture(model, X, total)


# The model's own mistakes.


def multiply_wrong_shapes(linear, x):
    return linear(x) @ x


def raise_own_error(linear, x):
    raise KeyError("my key")


@pytest.mark.parametrize(
    ("forward", "line", "reason"),
    [
        (multiply_wrong_shapes, "return linear(x) @ x", "RuntimeError: a and b must have same"),
        (raise_own_error, 'raise KeyError("my key")', "KeyError: 'my key'"),
    ],
)
def test_error_of_the_model_names_its_line(forward, line, reason):
    message = error_of(forward)
    assert message.startswith("the model fails in its own code at ")
    assert place(message) == line
    assert reason in message
    assert "\n" not in message


def test_shape_error_inside_a_torch_module_names_the_line_that_calls_it():
    def feed_too_much(linear, x):
        return linear(torch.cat([x, x], dim=1))

    assert place(error_of(feed_too_much)) == "return linear(torch.cat([x, x], dim=1))"


def test_error_without_a_line_of_the_user():
    with pytest.raises(
        CaptureError, match=r"outside the model's files: RuntimeError: .*4\] X \[5, 4"
    ):
        bayplan.capture(nn.Linear(5, 4), X, total)


def test_arguments_that_a_forward_does_not_take_are_a_mistake_of_the_batch():
    with pytest.raises(UsageError, match=r"forward does not take a tuple of 2: .*positional"):
        bayplan.capture(nn.Linear(4, 4), (X, X), total)


def test_error_in_the_loss_names_its_line():
    def bad_loss(output):
        return output @ output

    with pytest.raises(CaptureError) as caught:
        bayplan.capture(nn.Linear(4, 4), X, bad_loss)
    assert str(caught.value).startswith("the loss fails in its own code at ")
    assert place(str(caught.value)) == "return output @ output"


def test_error_in_the_optimizer_names_its_line():
    def bad_optimizer(parameters):
        return torch.optim.SGD(parameters, lr=-1)

    with pytest.raises(CaptureError, match="Invalid learning rate: -1") as caught:
        bayplan.capture(nn.Linear(4, 4), X, total, optimizer=bad_optimizer)
    assert place(str(caught.value)) == "return torch.optim.SGD(parameters, lr=-1)"


def test_errors_of_ours_pass_through():
    with pytest.raises(UsageError, match="as it is"), explained():
        raise UsageError("as it is")


# The traceback.


def test_users_traceback_shows_only_the_users_frames():
    with pytest.raises(CaptureError) as caught:
        bayplan.capture(Model(multiply_wrong_shapes), X, total)
    text = users_traceback(caught.value.__cause__)
    files = re.findall(r'File "(.*?)", line \d+, in (\w+)', text)
    assert files == [(__file__, "forward"), (__file__, "multiply_wrong_shapes")]
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.rstrip().splitlines()[-1].startswith("RuntimeError: a and b must have same")


def test_users_traceback_is_empty_where_the_user_has_no_frame():
    with pytest.raises(CaptureError) as caught:
        bayplan.capture(nn.Linear(4, 4), torch.ones(2, 5), total)
    assert users_traceback(caught.value.__cause__) == ""


def test_model_in_a_file_elsewhere_is_named_by_its_last_folder(tmp_path):
    path = tmp_path / "project" / "net.py"
    path.parent.mkdir()
    path.write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * x.sum().item()\n"
    )
    spec = importlib.util.spec_from_file_location("net", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(CaptureError, match=r"^project/net.py:4 \(`return super"):
        bayplan.capture(build_without_memory(partial(module.Net, 4, 4)), X, total)


# Memory.

TOO_MUCH = 2**62


def ask_torch() -> torch.Tensor:
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


def ask_numpy() -> numpy.ndarray:
    return numpy.empty(TOO_MUCH, dtype=numpy.uint8)


def ask_python() -> bytes:
    return bytes(TOO_MUCH)


@pytest.mark.parametrize(
    ("ask", "asked"),
    [(ask_torch, "4194304.0 TiB"), (ask_numpy, "4.00 EiB"), (ask_python, "more")],
)
def test_out_of_memory_is_no_fault_of_the_models_code(ask, asked):
    with pytest.raises(DoesNotFit) as caught, explained():
        ask()
    assert caught.value.exit_code is ExitCode.DOES_NOT_FIT
    assert f"asked for {asked} where" in str(caught.value)
    assert "of cpu memory are free" in str(caught.value)
    assert "smaller batch" in str(caught.value)
    assert place(str(caught.value)).startswith("return")


def test_builder_that_has_no_memory_is_told_so():
    def build():
        torch.ones(10_000).sum().item()  # so it cannot be built on tensors without memory
        return ask_torch()

    with pytest.raises(DoesNotFit, match="out of memory"):
        build_without_memory(build)


def test_out_of_memory_is_found_behind_other_errors_and_nowhere_else():
    error = RuntimeError("the compiler stopped")
    assert out_of_memory(error) is None
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert "asked for 20.00 MiB" in str(out_of_memory(error))
