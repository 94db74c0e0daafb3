"""Subjects of audits: noise kernels, private steps, releases of records, models, scripts."""
