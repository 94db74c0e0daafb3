"""Train privately with the Trainer of Hugging Face transformers.

    class PrivateSeq2SeqTrainer(PrivateTrainerMixin, Seq2SeqTrainer): ...

``PrivateTrainer`` is the mixin in front of ``Trainer``. One step of the Trainer is one logical
batch of ``per_device_train_batch_size * gradient_accumulation_steps`` expected records, so
``global_step``, schedulers, logs, evaluation and checkpoints count releases.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError
from ..engine import PrivacyEngine
from .arguments import PrivacyArguments
from .logical_batches import LogicalBatch, LogicalBatches, plain, rows_of, train_parts

check.require("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

STATE = "dpkern.pt"
"""File of the engine's state in a checkpoint folder."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # argument: values that are accepted, remedy
    "auto_find_batch_size": ((False,), "Pass max_physical_batch_size in PrivacyArguments."),
    "deepspeed": ((None,), "Train in one process without DeepSpeed."),
    "fp16": ((False,), "Pass bf16=True: float16 needs a scale of the loss."),
    "fsdp": ((None, "", [], False), "Train in one process, or use fully_shard with PrivacyEngine."),
    "include_num_input_tokens_seen": (
        ("no", False),
        "Leave it out: the number of tokens depends on which records were drawn.",
    ),
    "neftune_noise_alpha": ((None,), "Leave it out: its scale depends on the batch."),
    "torch_compile": (
        (False,),
        "Leave it out: Accelerate would compile the model around the private parameters. For a "
        "compiled model write the loop yourself, with PrivacyEngine.",
    ),
    "train_sampling_strategy": (
        ("random", "sequential"),
        "Leave it out: private batches are drawn by the loader of dpkern.",
    ),
    "use_liger_kernel": ((False,), "Leave it out: its kernels keep no per-sample gradients."),
}


class PrivateTrainerMixin:
    """The part of a private Trainer that stands in front of any class derived from ``Trainer``.

    ``TrainingArguments.max_grad_norm`` clips sums of gradients in ordinary training; here
    ``privacy.max_grad_norm`` bounds every record instead, and the Trainer's is not used.
    ``grad_norm`` is not logged: the norm of what the batch sums to is private. The training loss is
    logged with ``privacy.diagnostics`` only. ``epsilon`` and its ``delta`` are logged beside the
    learning rate, through every logger that the Trainer reports to.

    Args:
        args: ``TrainingArguments``, of which a copy is changed.
        privacy: the privacy arguments.
        arguments: those of the Trainer.

    Raises:
        InvalidInput: an argument that a private run cannot honour.
    """

    def __init__(
        self, *arguments: Any, args: Any = None, privacy: PrivacyArguments, **named: Any
    ) -> None:
        if len(arguments) > 1:
            raise InvalidInput(
                "args",
                expected="keyword arguments after the model",
                got=f"{len(arguments)} positional ones",
                remedy="Pass args= and the others by name.",
            )
        args = TrainingArguments("tmp_trainer") if args is None else args
        _check_arguments(args)
        self.privacy = privacy
        self.engine: PrivacyEngine | None = None
        """The engine; None before training."""
        self.logical_batches: LogicalBatches | None = None
        self._private_model: Any = None
        self._private_dataset: Any = None
        self.physical_batch_size: int | None = None
        """Number of records in one pass; None where the Trainer accumulates nothing."""
        factor = args.gradient_accumulation_steps
        args = copy.copy(args)
        if factor > 1:
            self.physical_batch_size = args.per_device_train_batch_size
            args.per_device_train_batch_size *= factor
            args.gradient_accumulation_steps = 1
        super().__init__(*arguments, args=args, **named)  # type: ignore[call-arg]
        trainer: Any = self
        if trainer.accelerator.num_processes > 1 or args.n_gpu > 1:
            raise InvalidInput(
                "args",
                expected="one process with one device",
                got=f"{trainer.accelerator.num_processes} processes, {args.n_gpu} GPUs",
                remedy="Set CUDA_VISIBLE_DEVICES to one device, or use PrivacyEngine with DDP.",
            )
        trainer.add_callback(_LogicalEpochs(self))

    # what becomes private

    def get_train_dataloader(self) -> Any:
        """Return the logical batches of the training data; makes model and optimizer private.

        Raises:
            DPKernError: as ``make_private``.
            PrivacyError: another model or data set than that of an earlier ``train``.
        """
        trainer: Any = self
        if self.logical_batches is not None:
            if trainer.model is not self._private_model:
                raise PrivacyError(
                    "model",
                    expected="the model that the first train() made private",
                    got="another one, as model_init makes for every train()",
                    remedy="Make a new PrivateTrainer for every run; epsilons of runs on the same "
                    "data add up.",
                )
            if trainer.train_dataset is not self._private_dataset:
                raise PrivacyError(
                    "train_dataset",
                    expected="the records that the first train() drew from",
                    got="others",
                    remedy="Make a new PrivateTrainer for other records, with a model that is not "
                    "private yet: the ledger of this one counts the first records only.",
                )
            return self.logical_batches
        batches = LogicalBatches(self._original_loader())
        optimizer = trainer.create_optimizer()
        args = trainer.args
        epochs = args.num_train_epochs
        steps = args.max_steps if args.max_steps > 0 else -int(-epochs * len(batches) // 1)
        self.engine, batches.private = self.privacy.make(
            trainer.model,
            getattr(optimizer, "optimizer", optimizer),
            batches.original,
            steps=steps,
            max_physical_batch_size=self.physical_batch_size,
        )
        self.logical_batches, self._private_model = batches, trainer.model
        self._private_dataset = trainer.train_dataset
        return batches

    def _original_loader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, before Accelerate has prepared it."""
        trainer: Any = self
        accelerator = trainer.accelerator
        accelerator.prepare = lambda loader: loader
        try:
            loader: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        finally:
            del accelerator.prepare
        return loader

    def _run_epoch(self, *arguments: Any, **named: Any) -> Any:
        """Run an epoch, or what a checkpoint has left of it: the private loader goes on by itself.

        A Trainer that resumes takes a new loader and skips its first batches; private batches that
        are drawn and left out would be other ones than those that were released.
        """
        done = named["steps_trained_in_current_epoch"]
        resumed = named["epoch"] == named["epochs_trained"]
        if named["resume_from_checkpoint"] is not None and resumed and done:
            trainer: Any = self
            named["steps_in_epoch"] -= done
            named["num_update_steps_per_epoch"] -= done
            named["steps_trained_in_current_epoch"] = 0
            trainer._load_rng_state(named["resume_from_checkpoint"])
        return super()._run_epoch(*arguments, **named)  # type: ignore[misc]

    # one step

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward pass of one logical batch, physical batch by physical batch.

        Returns:
            The mean loss with ``privacy.diagnostics``, else 0.
        """
        trainer: Any = self
        losses, rows = [], []

        def train(part: Any) -> None:
            rows.append(rows_of(part))
            try:
                loss = super(PrivateTrainerMixin, self).training_step(model, part, None)  # type: ignore[misc]
            except TypeError as error:
                if trainer.compute_loss_func is None or "NoneType" not in str(error):
                    raise
                raise InvalidInput(
                    "compute_loss_func",
                    expected="a function that takes None for num_items_in_batch",
                    got=f"TypeError: {error}",
                    remedy="Return the mean over the records, divided by their number. The number "
                    "of labels in a batch depends on which records were drawn and is not passed.",
                ) from error
            losses.append(plain(loss).float())

        batch = inputs if isinstance(inputs, LogicalBatch) else LogicalBatch([inputs])
        optimizer = trainer.optimizer
        train_parts(batch, getattr(optimizer, "optimizer", optimizer), train)
        if not self.privacy.diagnostics:
            return torch.zeros((), device=trainer.args.device)
        weights = torch.tensor(rows, dtype=torch.float32, device=losses[0].device)
        return (torch.stack(losses) * weights).sum() / weights.sum().clamp(min=1)

    def _get_num_items_in_batch(self, *arguments: Any, **named: Any) -> None:
        """Return None: a loss over the labels of the whole batch is no sum over records."""

    def _clip_grad_norm(self, model: Any) -> None:
        """Do nothing: every record's gradient is clipped in the optimizer's step."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Return None, so that no ``grad_norm`` is logged."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the operations of a batch depend on which records were drawn."""
        return 0

    # what is written

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Log what epsilon covers, and epsilon itself beside training metrics."""
        if "loss" in logs or "train_loss" in logs:
            if not self.privacy.diagnostics:
                logs = {k: v for k, v in logs.items() if k not in ("loss", "train_loss")}
            found = None if self.engine is None else self.privacy.epsilon(self.engine)
            if found is not None:
                logs = {**logs, "epsilon": found[0], "delta": found[1]}
        super().log(logs, *arguments, **named)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.engine is not None:
            torch.save(self.engine.state_dict(), Path(output_dir) / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None or self.engine is None:
            return
        path = Path(checkpoint) / STATE
        if not path.is_file():
            raise PrivacyError(
                "resume_from_checkpoint",
                expected=f"a checkpoint of a private run, with {STATE}",
                got="one without it",
                remedy="Start a new run: the privacy that these steps have cost is not known.",
            )
        try:
            self.engine.load_state_dict(torch.load(path, weights_only=True))
        except InvalidInput as error:
            if self.privacy.target_epsilon is None:
                raise
            raise InvalidInput(
                "resume_from_checkpoint",
                expected="a run of as many steps as the one that was saved, because the noise "
                "for target_epsilon depends on their number",
                got=f"{error.name} {error.got}, where the checkpoint has {error.expected}",
                remedy="Resume with the num_train_epochs, max_steps and batch size of that run. To "
                "train longer, pass its noise_multiplier instead of target_epsilon: epsilon grows.",
            ) from error


class PrivateTrainer(PrivateTrainerMixin, Trainer):  # type: ignore[misc]
    """The private ``Trainer``; see ``PrivateTrainerMixin``."""


class _LogicalEpochs(TrainerCallback):  # type: ignore[misc]
    """Counts epochs by releases, also in an epoch that a checkpoint had begun."""

    def __init__(self, trainer: PrivateTrainerMixin) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch before anything logs it."""
        if self.trainer.logical_batches is not None:
            state.epoch = state.global_step / len(self.trainer.logical_batches)


def _check_arguments(args: Any) -> None:
    for name, (accepted, remedy) in _REFUSED.items():
        value = getattr(args, name, accepted[0])
        check.that(value in accepted, f"args.{name}", repr(accepted[0]), value, remedy)
