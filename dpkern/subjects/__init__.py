"""What can be audited: noise kernels, private steps, releases of single records, models, scripts."""
