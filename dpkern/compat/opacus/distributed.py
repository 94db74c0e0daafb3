"""The wrapper for several processes: PyTorch's own, which ``make_private`` takes off again.

It makes all processes begin with the weights of the first, as Opacus' does.
"""

from torch.nn.parallel import DistributedDataParallel

DifferentiallyPrivateDistributedDataParallel = DistributedDataParallel

__all__ = ["DifferentiallyPrivateDistributedDataParallel"]
