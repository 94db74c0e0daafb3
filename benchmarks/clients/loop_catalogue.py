"""The loops of ``benchmarks.clients.loops``, as users of either library write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, WeightedRandomSampler

from .loops import BOUND, LR, RECORDS, World

LOOPS: list[tuple[Callable[[World], Any], bool]] = []
"""Each loop, and whether a certificate can describe it."""


def right(loop: Callable[[World], Any]) -> Callable[[World], Any]:
    LOOPS.append((loop, True))
    return loop


def must_be_refused(loop: Callable[[World], Any]) -> Callable[[World], Any]:
    LOOPS.append((loop, False))
    return loop


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def fit(made: Any, loss: Callable[..., Tensor] = F.cross_entropy) -> None:
    model, optimizer, loader, *_ = made
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


@right
def plain_loop(w: World) -> None:
    fit(w.private(mlp()))


@right
def gradients_cleared_after_the_step(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@right
def sum_of_losses(w: World) -> None:
    made = w.private(mlp(), loss_reduction="sum")
    made[1].param_groups[0]["lr"] = LR / RECORDS
    fit(made, lambda out, y: F.cross_entropy(out, y, reduction="sum"))


@right
def evaluation_and_schedule_in_the_epoch(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x_held, _ = w.data[:5]
    for x, y in loader:
        model.eval()
        with torch.no_grad():
            model(x_held)
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()


@right
def momentum_and_weight_average(w: World) -> None:
    model = mlp()
    model, optimizer, loader = w.private(
        model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    )
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)


@right
def closure_for_the_optimizer(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@right
def bfloat16_autocast(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@right
def dropout_and_gradient_checkpoints(w: World) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
            self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            h: Any = checkpoint(self.block, self.first(x), use_reentrant=False)
            out: Tensor = self.last(h)
            return out

    fit(w.private(Checkpointed()))


@right
def two_losses_in_two_backward_passes(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        (0.1 * model(x).square().sum(1)).mean().backward()
        optimizer.step()


@right
def physical_batches_with_the_memory_manager(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    with w.parts(loader, optimizer) as parts:
        fit((model, optimizer, parts))


@right
def clipping_layer_by_layer(w: World) -> None:
    bounds = [BOUND / 2] * 4
    fit(w.private(mlp(), clipping="per_layer", max_grad_norm=bounds))


@right
def torch_compile(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    fit((torch.compile(model, backend="eager"), optimizer, loader))


@right
def frozen_layers_with_lora(w: World) -> None:
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(mlp(), LoraConfig(r=4, target_modules=["0", "2"]))
    fit(w.private(adapted))


@right
def texts_of_several_lengths(w: World) -> None:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = recurrent(w)(1, 8, batch_first=True)
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.arange(len(x)) % 5 + 2
            packed = nn.utils.rnn.pack_padded_sequence(
                x[:, :, None], lengths, batch_first=True, enforce_sorted=False
            )
            _, (h, _) = self.lstm(packed)
            out: Tensor = self.last(h[-1])
            return out

    fit(w.private(Texts()))


def recurrent(w: World) -> Any:
    if w.peer == "dpkern":
        return nn.LSTM
    from opacus.layers import DPLSTM

    return DPLSTM


@right
def attention_with_a_tied_head(w: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(self.table(x.long().remainder(8)))
            return (h[:, 0] @ self.table.weight.t())[:, :3]

    fit(w.private(Tied()))


@right
def run_saved_and_resumed(w: World) -> None:
    model, optimizer, _ = w.private(mlp())
    w.engine.save_checkpoint(path="run.pt", module=model, optimizer=optimizer)
    again = w.private(mlp())
    w.engine.load_checkpoint(path="run.pt", module=again[0], optimizer=again[1])
    w.watch(w.module)
    fit(again)


@right
def adversarial_discriminator(w: World) -> None:
    from contextlib import nullcontext

    generator = nn.Linear(2, 6)
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer, loader = w.private(discriminator)
    public = w.engine.public if w.peer == "dpkern" else nullcontext
    for x, _ in loader:
        optimizer.zero_grad()
        F.softplus(-model(x)).mean().backward()
        with public():
            fakes = generator(torch.randn(len(x), 2, generator=torch.Generator().manual_seed(2)))
            F.softplus(model(fakes.detach())).mean().backward()
        optimizer.step()


@right
def trainer_of_transformers_with_accumulation(w: World) -> None:
    import transformers

    privacy = w.ours()
    from dpkern.integrations.transformers import PrivateTrainer

    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = w.watch(transformers.BertForSequenceClassification(config))
    x, y = w.data.tensors
    ids = (x * 10).long().remainder(40)
    arguments = transformers.TrainingArguments(
        "out", per_device_train_batch_size=4, gradient_accumulation_steps=RECORDS // 4,
        num_train_epochs=1, learning_rate=LR, optim="sgd", lr_scheduler_type="constant",
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = PrivateTrainer(
        model, args=arguments, privacy=privacy,
        train_dataset=[{"input_ids": i, "labels": j} for i, j in zip(ids, y, strict=True)],
    )  # fmt: skip
    trainer.train()
    w.engine = trainer.engine


@right
def accelerate_with_accumulation(w: World) -> None:
    privacy = w.ours()
    from dpkern.integrations.accelerate import PrivateAccelerator

    accelerator = PrivateAccelerator(gradient_accumulation_steps=4, cpu=True)
    model = w.watch(mlp())
    model, optimizer, loader = accelerator.make_private(
        model, torch.optim.SGD(model.parameters(), lr=LR), w.loader(batch_size=4), privacy=privacy
    )
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    w.engine = accelerator.engine


@right
def lightning_with_accumulation(w: World) -> None:
    import lightning

    privacy = w.ours()
    from dpkern.integrations.lightning import PrivateStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LR)

    module = Module()
    w.watch(module.net)
    strategy = PrivateStrategy(privacy)
    lightning.Trainer(
        strategy=strategy, max_epochs=1, accumulate_grad_batches=4, accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, w.loader(batch_size=4))  # fmt: skip
    w.engine = strategy.engine


@must_be_refused
def own_loader_iterated(w: World) -> None:
    """The certificate speaks of drawn batches, and the loop takes others."""
    own = w.loader(batch_size=4)
    model, optimizer, _ = w.private(mlp(), loader=own)
    fit((model, optimizer, own))


@must_be_refused
def centred_by_the_batch(w: World) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x - x.mean(0))
            return out

    fit(w.private(Centred()))


@must_be_refused
def weighted_sampler(w: World) -> None:
    sampler = WeightedRandomSampler([1.0] * 8 + [9.0] * 8, RECORDS)
    fit(w.private(mlp(), loader=DataLoader(w.data, batch_size=4, sampler=sampler)))


@must_be_refused
def loss_over_the_most_frequent_class(w: World) -> None:
    """Which records count depends on all of them."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        frequency = torch.bincount(y, minlength=3).float() / len(y)
        return (F.cross_entropy(out, y, reduction="none") / frequency[y]).mean()

    fit(w.private(mlp()), loss)


@must_be_refused
def best_batch_kept(w: World) -> None:
    """A step is taken or left by what its batch says: the accountant does not know of it."""
    model, optimizer, loader = w.private(mlp(), loader=w.loader(batch_size=4))
    kept = copy.deepcopy(model.state_dict())
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if float(loss) > 1.0:
            continue
        loss.backward()
        optimizer.step()
    assert kept
