"""Replay a private step from a flat list of kernel calls that was validated once.

From the bottom: ``facts`` (conditions on a use), ``memory`` and ``sums`` (memory at fixed
addresses), ``arithmetic`` (floats or integers), ``site`` (one use), ``run`` (one pass), a module
for each kind of use, ``joined`` (several uses of one parameter), ``flat`` (the calls that close a
step), ``program`` (when a step is recorded and when it is replayed),
``packed_update`` (the update of the parameters), ``known_optimizer`` (what it is compared with).
"""
