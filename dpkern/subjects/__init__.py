"""What can be audited: noise, steps, mechanisms, models, scripts."""
