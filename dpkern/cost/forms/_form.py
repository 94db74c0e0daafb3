"""The type of closed forms, and their projection to an op's declared cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...base.counts import EXECUTED, Itemised
from ...base.op_cost import Cost

Form = Callable[..., Itemised]
"""A function from an op's arguments, and by keyword what its data decides, to what it takes."""


def executed(form: Form) -> Form:
    """Mark the form of an op that a counted kernel executes: all its lines are ``executed``."""

    def proved(*args: Any, **kwargs: Any) -> Itemised:
        items = form(*args, **kwargs).items
        return Itemised(tuple(replace(item, evidence=EXECUTED) for item in items))

    return proved


def cost_of(form: Form) -> Callable[..., Cost]:
    """Project a form to the declared cost of its op: bytes, flops and words."""

    def cost(*args: Any, **kwargs: Any) -> Cost:
        items = form(*args, **kwargs).items
        return Cost(
            bytes_read=sum(item.bytes_read for item in items),
            bytes_written=sum(item.bytes_written for item in items),
            flops=sum(item.floating for item in items),
            random_words=sum(item.counts["RNG"] for item in items),
        )

    return cost


__all__ = ["Form", "cost_of", "executed"]
