"""Lightning: the numbers of plain training, its log, and refusals."""

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import bayplan
from bayplan.data.errors import UsageError
from bayplan.integrations.lightning import FitCallback


class Classifier(pl.LightningModule):
    """Logs, counts a metric, keeps a list and draws numbers, as training steps do."""

    def __init__(self, net):
        super().__init__()
        self.net, self.losses, self.validated = net, [], []
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=5)

    def forward(self, x):
        return self.net(x)

    def called(self, x):
        return self(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.called(x + 0.01 * torch.randn_like(x))
        loss = F.cross_entropy(output, y)
        self.log("loss", loss)
        self.log("accuracy", self.accuracy(output, y))
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch):
        self.validated.append(F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


class OfInner(Classifier):
    """Calls the network, and tells its loss in a dict."""

    def called(self, x):
        return self.net(x)

    def training_step(self, batch):
        return {"loss": super().training_step(batch, 0)}


def trainer_of(folder, *callbacks, **settings):
    return pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        logger=False,
        **{"enable_checkpointing": False, "max_epochs": 2, **settings},
    )


def train(module, dataset, trainer, **more):
    torch.manual_seed(1)
    loaders = DataLoader(dataset, 256, shuffle=True), DataLoader(dataset, 300)
    trainer.fit(module, *loaders, **more)
    return module.losses + module.validated, module.state_dict()


@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Classifier, {}),
        (OfInner, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (Classifier, {"precision": "bf16-mixed"}),
        (OfInner, {"precision": "bf16-true"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_same_bits(kind, settings, network, dataset, assert_bits, tmp_path):
    plain = train(kind(network()), dataset, trainer_of(tmp_path, **settings))
    callback, module = FitCallback("80%", time_limit_seconds=1), kind(network())
    trainer = trainer_of(tmp_path, callback, **settings)
    assert_bits(plain, train(module, dataset, trainer))
    fitted = module if kind is Classifier else module.net
    assert bayplan.plan_of(fitted).decisions
    logged = trainer.callback_metrics
    names = {"predicted_peak_bytes", "predicted_seconds", "measured_peak_bytes", "measured_seconds"}
    assert {f"bayplan/{name}" for name in names} <= logged.keys()
    assert 0 < logged["accuracy"] < 1


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_checkpoints_are_saved_and_resumed_as_ever(network, dataset, assert_bits, tmp_path):
    found = []
    for memory in (None, "80%"):
        path = tmp_path / f"{memory}.ckpt"
        for resumed in (None, path):
            callbacks = [] if memory is None else [FitCallback(memory, time_limit_seconds=1)]
            trainer = trainer_of(tmp_path, *callbacks, max_epochs=1 if resumed is None else 2)
            module = Classifier(network())
            done = train(module, dataset, trainer, ckpt_path=resumed, weights_only=False)
            if resumed is None:
                trainer.save_checkpoint(path)
        found.append(done)
    assert_bits(*found)


def test_loss_that_cannot_be_found_out_may_be_given(network, dataset, tmp_path):
    class Sparse(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).to_sparse().to_dense()

    with pytest.raises(bayplan.BayplanError) as refused:
        train(Sparse(network()), dataset, trainer_of(tmp_path, FitCallback("70%")))
    assert any("loss_fn=" in note for note in refused.value.__notes__)

    def loss_fn(output, batch):
        return F.cross_entropy(output, batch[1])

    callback, module = FitCallback("100%", loss_fn=loss_fn, measure=False), Sparse(network())
    train(module, dataset, trainer_of(tmp_path, callback, max_steps=1))
    assert bayplan.plan_of(module)


class Reading(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if float(loss.detach()) > 1e6:
            raise FloatingPointError
        return loss


def test_loss_that_is_read_has_the_same_bits(network, dataset, assert_bits, tmp_path):
    plain = train(Reading(network()), dataset, trainer_of(tmp_path))
    callback = FitCallback("80%", time_limit_seconds=1)
    assert_bits(plain, train(Reading(network()), dataset, trainer_of(tmp_path, callback)))


class InTwoParts(Classifier):
    def __init__(self, net):
        super().__init__(net)
        self.head = nn.Linear(5, 5)

    def called(self, x):
        return self.head(self.net(x))


class ByHand(Classifier):
    def __init__(self, net):
        super().__init__(net)
        self.automatic_optimization = False


class ItsForward(Classifier):
    def called(self, x):
        return F.linear(x, self.net[4].weight)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (InTwoParts, "calls net, which holds only some"),
        (ByHand, "optimizes by hand"),
        (ItsForward, "does not call the model"),
    ],
)
def test_modules_that_cannot_be_planned_are_refused(kind, says, network, dataset, tmp_path):
    with pytest.raises(UsageError, match=says):
        train(kind(network()), dataset, trainer_of(tmp_path, FitCallback("70%")))


def test_compiled_modules_are_refused(network, dataset, tmp_path):
    module = torch.compile(Classifier(network()), backend="eager")
    with pytest.raises(UsageError, match="is compiled by torch"):
        train(module, dataset, trainer_of(tmp_path, FitCallback("70%")))


def test_sharding_strategies_are_refused(network, dataset, tmp_path):
    class Configured(Classifier):
        def configure_model(self):
            pass

    trainer = trainer_of(tmp_path, FitCallback("70%"), strategy=ModelParallelStrategy(), devices=1)
    with pytest.raises(UsageError, match="ModelParallelStrategy"):
        train(Configured(network()), dataset, trainer)
