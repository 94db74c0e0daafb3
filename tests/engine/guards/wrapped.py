"""Loops of Hugging Face Accelerate and Trainer, Lightning and Fabric.

The packages are imported inside the loops, so that the table can be read without them.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import cross_entropy, mlp
from tests.engine.guards.records import CLASSES, LENGTH, TEXTS, TOKENS, WORDS, padded

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ACCELERATE = Table("Accelerate")
TRAINER = Table("Trainer", kind=replace(TOKENS, hostile=TOKENS.hostile[:1]))
LIGHTNING = Table("Lightning")

TABLES = [ACCELERATE, TRAINER, LIGHTNING]
PACKAGES = {"Accelerate": "accelerate", "Trainer": "transformers", "Lightning": "lightning"}

HALF = 2.0**-6
"""What rounding to 16 bits may move."""


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def _train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model, x, y))
        optimizer.step()


@ACCELERATE.refused(PrivacyError, texts.REMADE)
def everything_prepared(w: World) -> None:
    """``prepare`` makes a loader of its own out of the private one's parts."""
    accelerator = _accelerator()
    model, optimizer, loader = accelerator.prepare(*w.private(mlp()))
    _train(accelerator, model, optimizer, loader)


@ACCELERATE.refused(PrivacyError, texts.REMADE)
def everything_prepared_with_physical_batches(w: World) -> None:
    accelerator = _accelerator()
    made = w.private(mlp(), max_physical_batch_size=2)
    _train(accelerator, *accelerator.prepare(*made))


@ACCELERATE.right()
def model_and_optimizer_prepared(w: World) -> None:
    """The remedy: the private loader stays as it is."""
    accelerator = _accelerator()
    model, optimizer, loader = w.private(mlp())
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = ((x.to(accelerator.device), y.to(accelerator.device)) for x, y in loader)
    _train(accelerator, model, optimizer, batches)


@ACCELERATE.right(slack=HALF)
def model_and_optimizer_prepared_in_bfloat16(w: World) -> None:
    accelerator = _accelerator(mixed_precision="bf16")
    model, optimizer, loader = w.private(mlp())
    model, optimizer = accelerator.prepare(model, optimizer)
    _train(accelerator, model, optimizer, loader)


@ACCELERATE.refused(PrivacyError, texts.STILL_WAITING)
def accumulated_over_batches(w: World) -> None:
    accelerator = _accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = w.private(mlp())
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model, x, y))
            optimizer.step()
            optimizer.zero_grad()


@ACCELERATE.right()
def accumulated_over_physical_batches(w: World) -> None:
    """The remedy: the engine accumulates by itself."""
    accelerator = _accelerator()
    model, optimizer, loader = w.private(mlp(), max_physical_batch_size=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    _train(accelerator, model, optimizer, loader)


@ACCELERATE.refused(InvalidInput, "AcceleratedOptimizer, which wraps one. Pass the one inside")
def prepared_before_it_is_private(w: World) -> None:
    accelerator = _accelerator()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, w.loader())
    _train(accelerator, *w.private(model, optimizer=optimizer, loader=loader))


@ACCELERATE.right()
def optimizer_inside_the_prepared_one(w: World) -> None:
    """The remedy: ``make_private`` takes the optimizer that Accelerate has wrapped."""
    accelerator = _accelerator()
    model = mlp()
    prepared = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    model, optimizer, loader = w.private(model, optimizer=prepared.optimizer)
    _train(accelerator, model, optimizer, loader)


def _classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def labelled(records: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    ids, y = zip(*records, strict=True)
    return {"input_ids": torch.stack(ids), "labels": torch.stack(y)}


def padded_labels(records: Sequence[Tensor]) -> dict[str, Tensor]:
    """As the collator for language models: padding is not to be learnt."""
    batch = padded(records)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def _trainer(
    w: World,
    model: nn.Module,
    *,
    collate: Any = labelled,
    private: bool = True,
    counted: bool = True,
    options: dict[str, Any] | None = None,
    compute: Any = None,
) -> None:
    """Train by a Trainer; ``private`` gives it the private loader, as the remedy says."""
    from transformers import Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    pads = collate is padded_labels
    model, optimizer, loader = w.private(
        model, loader=w.loader(collate_fn=collate), masked_padding=pads
    )

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader if private else super().get_train_dataloader()

        def log(self, *args: Any, **named: Any) -> None:
            pass

    if compute is not None:
        Own.compute_loss = compute
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "output_dir": folder,
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "save_strategy": "no",
            "logging_strategy": "no",
            "remove_unused_columns": False,
        }
        trainer = Own(
            model=model,
            args=TrainingArguments(**(given | (options or {}))),
            train_dataset=w.data,
            data_collator=collate,
            optimizers=(optimizer, None),
        )
        if not counted:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()


@TRAINER.refused(PrivacyError, texts.NOT_YIELDED)
def loader_of_the_trainer(w: World) -> None:
    _trainer(w, _classifier(), private=False)


@TRAINER.refused(UnsupportedModule, "a sum over samples")
def private_loader_and_counted_labels(w: World) -> None:
    """The number of labels in the batch is passed to the module."""
    _trainer(w, _classifier())


@TRAINER.right()
def private_loader_without_counted_labels(w: World) -> None:
    """The remedy: ``model_accepts_loss_kwargs = False``."""
    _trainer(w, _classifier(), counted=False)


@TRAINER.right()
def loss_of_the_trainers_own(w: World) -> None:
    """The remedy that needs no private name: ``compute_loss`` on logits."""

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels)

    _trainer(w, _classifier(), compute=compute_loss)


@TRAINER.right(kind=replace(TEXTS, hostile=TEXTS.hostile[:1]), bounds=(4.0,))
def language_model_with_its_default_loss(w: World) -> None:
    """A mean over the tokens of the batch, taken inside the module."""
    _trainer(w, _language_model(), collate=padded_labels, counted=False)


@TRAINER.refused(PrivacyError, texts.STILL_WAITING)
def trainer_that_accumulates(w: World) -> None:
    options = {"gradient_accumulation_steps": 2}
    _trainer(w, _classifier(), counted=False, options=options)


@TRAINER.right(slack=HALF)
def trainer_in_bfloat16_with_checkpoints(w: World) -> None:
    options = {"bf16": True, "gradient_checkpointing": True}
    _trainer(w, _classifier(), counted=False, options=options)


def _module(w: World, *, logged: bool = False, foreign: bool = False, manual: bool = False) -> Any:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.automatic_optimization = not manual

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            output = self(x)
            loss = F.cross_entropy(output, y)
            if logged:
                self.log("loss", loss, prog_bar=True)
                self.log("accuracy", (output.argmax(1) == y).float().mean())
            if manual:
                own = self.optimizers()
                own.zero_grad()
                self.manual_backward(loss)
                own.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held out", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            if foreign:
                return torch.optim.SGD(self.parameters(), lr=0.0)
            return w.engine.adapter.optimizer

    return Module()


def _fit(w: World, module: Any, loader: Any, held_out: Any = None, **options: Any) -> None:
    import lightning

    given = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(**(given | options)).fit(module, loader, held_out)


@LIGHTNING.right()
def fit_with_the_private_loader(w: World) -> None:
    module = _module(w)
    _, _, loader = w.private(module.net)
    _fit(w, module, loader)


@LIGHTNING.right()
def fit_of_the_private_module_itself(w: World) -> None:
    module = _module(w)
    _, _, loader = w.private(module)
    _fit(w, module, loader)


@LIGHTNING.right(slack=HALF)
def fit_in_bfloat16_with_logs_and_validation(w: World) -> None:
    module = _module(w, logged=True)
    held_out = w.loader(batch_size=5, shuffle=False)
    _, _, loader = w.private(module.net)
    _fit(w, module, loader, held_out, precision="bf16-mixed", max_epochs=2)


@LIGHTNING.right()
def fit_by_hand(w: World) -> None:
    module = _module(w, manual=True)
    _, _, loader = w.private(module.net)
    _fit(w, module, loader)


@LIGHTNING.refused(PrivacyError, texts.NOT_YIELDED)
def fit_with_the_original_loader(w: World) -> None:
    module = _module(w)
    original = w.loader()
    w.private(module.net, loader=original)
    _fit(w, module, original)


@LIGHTNING.refused(PrivacyError, texts.STILL_WAITING)
def fit_that_accumulates(w: World) -> None:
    module = _module(w)
    _, _, loader = w.private(module.net)
    _fit(w, module, loader, accumulate_grad_batches=2)


@LIGHTNING.refused(PrivacyError, texts.STILL_WAITING)
def fit_with_another_optimizer(w: World) -> None:
    module = _module(w, foreign=True)
    _, _, loader = w.private(module.net)
    _fit(w, module, loader)


@LIGHTNING.right()
def fabric(w: World) -> None:
    import lightning

    model, optimizer, loader = w.private(mlp())
    runner = lightning.Fabric(accelerator="cpu", devices=1)
    model, optimizer = runner.setup(model, optimizer)
    for x, y in runner.setup_dataloaders(loader):
        optimizer.zero_grad()
        runner.backward(cross_entropy(model, x, y))
        optimizer.step()
