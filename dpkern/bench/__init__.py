"""Benchmarks that one can trust: cases of every op, paired samples, a guard against noise.

``case`` makes calls, ``cases`` holds the facts of every op and the sizes that are timed,
``formulations`` the same work in plain torch. ``paired`` decides how much is sampled and what it
shows, ``guard`` whether the machine was quiet, ``measure`` puts a row together, ``results`` keeps
rows with everything that they depend on. ``dpkern bench`` is the command.
"""
