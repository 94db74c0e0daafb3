"""A private step as a flat list that is validated once and replayed.

From the bottom: ``facts`` (what a use must be like), ``memory`` and ``sums`` (what stays at its
address), ``site`` (one use), ``run`` (one pass), a module for each kind of use, ``flat`` (the
close), ``program`` (when a step is recorded and when it is replayed), ``packed_update``.
"""
