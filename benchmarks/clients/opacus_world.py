"""Run a script of Opacus among generated data, and among names of libraries that are gone.

    python -m benchmarks.clients.opacus_world SCRIPT [argument ...]

``benchmarks.clients.opacus_examples`` calls this. Nothing is downloaded.
"""

from __future__ import annotations

import runpy
import sys
import types
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .catalogue import import_torchvision

RECORDS = 192


class Pictures(Dataset[Any]):
    """Pictures whose brightness tells the class, in the place of MNIST."""

    channels, side = 1, 28

    def __init__(self, *_: Any, transform: Any = None, **__: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.arange(RECORDS) % 10
        shape = (RECORDS, self.side, self.side, self.channels)
        noise = torch.randint(0, 60, shape, generator=generator)
        self.data = (noise + 18 * self.targets.view(-1, 1, 1, 1)).to(torch.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        picture = Image.fromarray(self.data[index].squeeze(-1).numpy())
        return self.transform(picture), int(self.targets[index])


class Colours(Pictures):
    """The same in the place of CIFAR-10."""

    channels, side = 3, 32


class Reviews(list[Any]):
    """Texts of several lengths, in the place of IMDB's."""

    def map(self, *_: Any, **__: Any) -> dict[str, Any]:
        return Splits(train=self, test=self)


class Splits(dict[str, Any]):
    """The two halves of a data set, which are the same here."""

    def set_format(self, **_: Any) -> None:
        """Records are tensors already."""


class Tokens:
    """A tokenizer, in the place of a pretrained one."""

    @classmethod
    def from_pretrained(cls, *_: Any) -> Tokens:
        return cls()

    def __len__(self) -> int:
        return 60


def texts() -> Reviews:
    generator = torch.Generator().manual_seed(0)
    rows = Reviews()
    for i in range(RECORDS):
        ids = torch.randint(2 + 20 * (i % 2), 40, (6 + i % 9,), generator=generator)
        rows.append({"input_ids": ids, "label": torch.tensor(i % 2)})
    return rows


def module(name: str, **names: Any) -> None:
    """Put a module of this name among the imported ones."""
    made: Any = types.ModuleType(name)
    vars(made).update(names)
    sys.modules[name] = made


def prepare(script: str) -> None:
    """Stand in for what a script imports and downloads."""
    import_torchvision()
    import torchvision.datasets

    torchvision.datasets.MNIST, torchvision.datasets.CIFAR10 = Pictures, Colours
    if "imdb" in script:
        module("datasets", load_dataset=lambda *_, **__: texts())
        module("transformers", BertTokenizerFast=Tokens)
    if "lightning" in script:
        prepare_lightning()


def prepare_lightning() -> None:
    import pytorch_lightning
    import torchmetrics
    from torchvision import transforms

    class Module(pytorch_lightning.LightningDataModule):
        def __init__(self, batch_size: int) -> None:
            super().__init__()
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            data = Pictures(transform=transforms.ToTensor())
            return DataLoader(data, batch_size=self.batch_size)

        test_dataloader = train_dataloader

    module("pl_bolts")
    module("pl_bolts.datamodules", MNISTDataModule=Module)
    module("pytorch_lightning.utilities.cli", LightningCLI=object)
    connector: Any = import_module(
        "pytorch_lightning.trainer.connectors.data_connector"
    )._DataConnector
    connector._train_dataloader_source = property(lambda self: self.trainer.fit_loop._data_source)
    whole = torchmetrics.Accuracy
    torchmetrics.Accuracy = lambda **_: whole(task="multiclass", num_classes=10)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    prepare(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
