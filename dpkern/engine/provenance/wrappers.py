"""Which training library runs the loop: for errors that name it and what to do there."""

from __future__ import annotations

import sys

_REMEDIES = {
    "transformers": "In a Trainer, override get_train_dataloader() to return the private loader.",
    "lightning": "With Lightning, pass the private loader to fit(model, train_dataloaders=loader).",
    "accelerate": "With Accelerate, leave the loader out of accelerator.prepare(): prepare "
    "model and "
    "optimizer only, iterate over the private loader and move its tensors with .to(device).",
}
_SAME = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning"}


def remedy_of_wrapper() -> str:
    """What to do in the training library whose code calls the module; empty in a plain loop.

    Accelerate calls user code and not the other way round: it is named wherever it is imported.
    """
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        package = _SAME.get(package, package)
        if package in _REMEDIES and package != "accelerate":
            return " " + _REMEDIES[package]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return " " + _REMEDIES["accelerate"] if "accelerate" in sys.modules else ""
