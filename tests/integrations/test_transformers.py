"""A private Trainer takes the steps of the plain loop, and counts, logs and resumes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.integrations.arguments import PrivacyArguments
from tests.integrations.plain_loop import RECORDS, SEED, certified, same, schedule, sgd, train

os.environ.setdefault("HF_HUB_OFFLINE", "1")

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = RECORDS // 8
"""Releases of an epoch with 8 expected records in a batch."""


def classifier() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return transformers.BertForSequenceClassification(config)


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(20, (RECORDS, 6), generator=generator)
    labels = torch.randint(3, (RECORDS,), generator=generator)
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def trainer_of(
    folder: Path,
    *,
    model: nn.Module | None = None,
    privacy: dict[str, Any] | None = None,
    seed: int | None = SEED,
    **options: Any,
) -> Any:
    from dpkern.integrations.transformers import PrivateTrainer

    transformers.logging.set_verbosity_error()
    model = model or classifier()
    optimizer = sgd(model)
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    held_out = {"eval_dataset": texts()} if "eval_strategy" in options else {}
    chosen = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "options": {"unsafe_seed": seed}}
    return PrivateTrainer(
        model,
        args=transformers.TrainingArguments(**(given | options)),
        train_dataset=texts(),
        optimizers=(optimizer, schedule(optimizer)),
        **held_out,
        privacy=PrivacyArguments(**(chosen | (privacy or {}))),
    )


@pytest.mark.parametrize(("size", "factor"), [(8, 1), (4, 2), (3, 8)])
def test_the_steps_are_those_of_the_plain_loop(tmp_path: Path, size: int, factor: int) -> None:
    trainer = trainer_of(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=factor
    )
    trainer.train()
    model = classifier()
    physical = None if factor == 1 else size
    train(model, texts(), loss, batch_size=size * factor, physical=physical, epochs=2)
    assert same(trainer.model, model)
    assert not same(model, classifier())


@pytest.mark.parametrize("size", [4, 8])
def test_the_certificate_is_that_of_the_plain_loop(tmp_path: Path, size: int) -> None:
    trainer = trainer_of(
        tmp_path,
        seed=None,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
    )
    trainer.train()
    plain = train(classifier(), texts(), loss, batch_size=8, physical=None, epochs=2, seed=None)
    assert certified(trainer.engine) == certified(plain)
    assert 0 < plain.get_epsilon(1e-3) < float("inf")


def test_steps_and_logs_count_releases(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, seed=None)
    assert trainer.train().training_loss == 0
    assert trainer.state.global_step == trainer.engine.step.steps == 2 * STEPS
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [entry["learning_rate"] for entry in logs] == [0.2 * 0.5**k for k in range(2 * STEPS)]
    assert [entry["epoch"] for entry in logs] == [(k + 1) / STEPS for k in range(2 * STEPS)]
    spent = [entry["epsilon"] for entry in logs]
    assert spent == sorted(spent)
    assert spent[-1] == trainer.engine.accountant.bound_of(logs[-1]["delta"])
    written = {name for entry in trainer.state.log_history for name in entry}
    assert written.isdisjoint({"grad_norm", "loss", "train_loss"})
    assert trainer.state.total_flos == 0


def test_the_training_loss_is_logged_on_request(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, privacy={"diagnostics": True}, max_steps=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(0.5 < each < 2 for each in losses)


def test_a_budget_is_met(tmp_path: Path) -> None:
    budget = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-3}
    trainer = trainer_of(tmp_path, privacy=budget, seed=None)
    trainer.train()
    assert 1.9 < trainer.engine.get_epsilon(1e-3) <= 2.0


@pytest.mark.parametrize("stop", [1, STEPS, STEPS + 1])
def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path, stop: int) -> None:
    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == stop

    options = {"save_strategy": "steps", "save_steps": 1}
    first = trainer_of(tmp_path, **options)
    first.add_callback(Stop())
    first.train()
    second = trainer_of(tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    assert same(second.model, whole.model)
    assert second.engine.step.steps == second.state.global_step == 2 * STEPS
    assert second.state.epoch == 2
    assert certified(second.engine) == certified(whole.engine)


def test_a_longer_run_for_the_same_budget_is_refused_with_the_reason(tmp_path: Path) -> None:
    budget = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-3}
    saved = {"save_strategy": "steps", "save_steps": 1}
    trainer_of(tmp_path, privacy=budget, **saved).train()
    longer = trainer_of(tmp_path, privacy=budget, num_train_epochs=3)
    with pytest.raises(InvalidInput, match="depends on their number"):
        longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert longer.engine.step.steps == 0


def test_a_loss_that_divides_by_the_number_of_labels_is_refused(tmp_path: Path) -> None:
    def by_labels(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        return loss / num_items_in_batch

    trainer = trainer_of(tmp_path)
    trainer.compute_loss_func = by_labels
    with pytest.raises(InvalidInput, match="takes None for num_items_in_batch"):
        trainer.train()
    assert trainer.engine.step.steps == 0


def test_a_checkpoint_without_its_privacy_is_refused(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    first.train()
    (tmp_path / "checkpoint-1" / "dpkern.pt").unlink()
    with pytest.raises(PrivacyError, match=r"with dpkern\.pt"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_holds_no_loss_and_no_count_of_records(tmp_path: Path) -> None:
    trainer_of(tmp_path, save_strategy="steps", save_steps=1, max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["total_flos"] == state["num_input_tokens_seen"] == 0
    assert all("loss" not in entry for entry in state["log_history"])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"neftune_noise_alpha": 5.0}, "args.neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "args.auto_find_batch_size"),
        ({"train_sampling_strategy": "group_by_length"}, "args.train_sampling_strategy"),
        ({"include_num_input_tokens_seen": "all"}, "args.include_num_input_tokens_seen"),
        ({"torch_compile": True}, "args.torch_compile"),
    ],
)
def test_arguments_that_cannot_be_private_are_refused(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidInput, match=name):
        trainer_of(tmp_path, **options)


def test_half_precision_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    args = trainer.args
    args.fp16 = True
    from dpkern.integrations.transformers import PrivateTrainer

    with pytest.raises(InvalidInput, match=r"args\.fp16"):
        PrivateTrainer(trainer.model, args=args, privacy=trainer.privacy)


def test_the_mixin_stands_in_front_of_other_trainers(tmp_path: Path) -> None:
    from dpkern.integrations.transformers import PrivateTrainerMixin

    class Own(PrivateTrainerMixin, transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            labels = inputs.pop("labels")
            return nn.functional.cross_entropy(model(**inputs).logits, labels)

    model = classifier()
    optimizer = sgd(model)
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=2, report_to=[], use_cpu=True
    )
    trainer = Own(
        model,
        args=args,
        train_dataset=texts(),
        optimizers=(optimizer, None),
        privacy=PrivacyArguments(noise_multiplier=1.0, max_grad_norm=0.5),
    )
    trainer.train()
    assert trainer.engine is not None
    assert trainer.engine.step.steps == 2


def test_held_out_records_are_evaluated_between_releases(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(
        tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", **options
    )
    trainer.train()
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(found) == trainer.engine.step.steps == 2 * STEPS
    plain = trainer_of(tmp_path / "plain")
    plain.train()
    assert trainer.state.log_history[-1]["epsilon"] == plain.state.log_history[-1]["epsilon"]


def test_padded_texts_train_where_the_caller_vouches_for_the_mask(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    data = [{"input_ids": torch.randint(1, 20, (3 + i % 5,))} for i in range(RECORDS)]

    def collate(records: Any) -> dict[str, Tensor]:
        ids = [record["input_ids"] for record in records]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = (padded > 0).long()
        return {
            "input_ids": padded,
            "attention_mask": mask,
            "labels": padded.masked_fill(mask == 0, -100),
        }

    def run(masked: bool) -> Any:
        from dpkern.integrations.transformers import PrivateTrainer

        trainer = PrivateTrainer(
            transformers.GPT2LMHeadModel(config),
            args=transformers.TrainingArguments(
                str(tmp_path),
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_steps=4,
                report_to=[],
                use_cpu=True,
            ),
            train_dataset=data,
            data_collator=collate,
            privacy=PrivacyArguments(
                noise_multiplier=1.0, max_grad_norm=0.5, options={"masked_padding": masked}
            ),
        )
        trainer.train()
        return trainer

    assert run(True).engine.step.steps == 4
    with pytest.raises(PrivacyError, match="masked_padding=True"):
        run(False)


def test_a_second_run_goes_on_with_one_ledger_and_refuses_another_model(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, seed=None, max_steps=2)
    trainer.train()
    spent = trainer.engine.get_epsilon(1e-3)
    trainer.train()
    assert trainer.engine.step.steps == 4
    assert trainer.engine.get_epsilon(1e-3) > spent
    trainer.model = trainer.model_wrapped = classifier()
    with pytest.raises(PrivacyError, match="the model that the first train"):
        trainer.train()
    assert trainer.engine.step.steps == 4


def test_a_second_run_on_other_records_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, seed=None, max_steps=2)
    trainer.train()
    trainer.train_dataset = texts()
    with pytest.raises(PrivacyError, match="train_dataset"):
        trainer.train()
    assert trainer.engine.step.steps == 2
