"""Recognize the training library that runs the loop, so that errors can say what to do in it."""

from __future__ import annotations

import sys

_REMEDIES = {
    "transformers": "In a Trainer, override get_train_dataloader() to return the private loader.",
    "lightning": "With Lightning, pass the private loader to fit(model, train_dataloaders=loader).",
    "accelerate": "With Accelerate, leave the loader out of accelerator.prepare(): prepare model "
    "and optimizer only, iterate over the private loader, and move tensors with .to(device).",
}
_SAME = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning"}


def remedy_of_wrapper() -> str:
    """Return the remedy for the training library that calls the module; empty in a plain loop.

    User code calls Accelerate, which therefore is in no frame: it is named if it is imported.
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
