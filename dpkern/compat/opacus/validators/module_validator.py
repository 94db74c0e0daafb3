"""Opacus' check and repair of modules, by dpkern's."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ....base.errors import InvalidInput, UnsupportedModule
from ....engine.fix import fix
from ....engine.validate import refuse, static_findings


class ModuleValidator:
    """Namespace of the calls; dpkern knows more constructs than a list of layer classes."""

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[UnsupportedModule]:
        """Return an error for each finding that keeps a module from being trained privately.

        Args:
            module: the module; nothing in it is changed.
            strict: True raises one error for all of them instead.

        Raises:
            UnsupportedModule: ``strict``, and there is a finding.
        """
        findings = [f for f in static_findings(module) if f.severity == "refuse"]
        if strict:
            refuse(module, findings)
        errors = []
        for finding in findings:
            try:
                refuse(module, [finding])
            except UnsupportedModule as error:
                errors.append(error)
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether ``validate`` finds nothing."""
        return not cls.validate(module)

    @staticmethod
    def fix(module: nn.Module, **options: Any) -> nn.Module:
        """Return a copy of the module whose batch normalisation is replaced (``dpkern.fix``).

        Raises:
            InvalidInput: an option of Opacus' fixers, of which there are none here.
        """
        if options:
            raise InvalidInput(
                "ModuleValidator.fix",
                expected="the module alone",
                got=", ".join(sorted(options)),
                remedy="Leave the options out, or replace the layers yourself: dpkern.fix chooses "
                "the groups of nn.GroupNorm.",
            )
        return fix(copy.deepcopy(module))

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """Return a copy as ``fix`` does, after a check of what is left.

        Raises:
            UnsupportedModule: what is left cannot be private.
        """
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed


__all__ = ["ModuleValidator"]
