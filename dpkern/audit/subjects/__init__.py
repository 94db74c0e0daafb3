"""What can be audited: noise kernels, private steps, releases of records, models, scripts."""
