"""The data module of Opacus' Lightning example, which dpkern answers with a strategy."""

from __future__ import annotations

from typing import Any, NoReturn

from ...base.errors import InvalidInput


class DPLightningDataModule:
    """Refusal of a data module that draws Poisson batches; ``PrivateStrategy`` makes the whole run
    private instead, and hands the module its batches.

    Raises:
        InvalidInput: always.
    """

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise InvalidInput(
            "DPLightningDataModule",
            expected="the ordinary data module, with the private strategy",
            got="a data module of Opacus",
            remedy="Pass the data module itself to trainer.fit, and "
            "dpkern.integrations.lightning.PrivateStrategy(PrivacyArguments(...)) as strategy= to "
            "the Trainer; leave make_private out of configure_optimizers.",
        )


__all__ = ["DPLightningDataModule"]
