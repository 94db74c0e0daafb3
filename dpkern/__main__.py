"""Run the command line, as ``dpkern`` and as ``python -m dpkern``."""

import gc
import sys

gc.freeze()  # what is imported by now stays: no collection need look at it again

from .cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
