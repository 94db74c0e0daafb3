"""Keep the engine's own work out of compiled graphs, at no cost where nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo  # the public one imports the compiler at once
from torch.compiler import is_dynamo_compiling


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function such that ``torch.compile`` breaks its graphs at it.

    Torch's own mark costs several calls each time; eager loops skip it.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The compiler folds the first condition to a constant, and so never traces the second.
        if not is_dynamo_compiling() and get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    return run
