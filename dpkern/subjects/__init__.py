"""What an audit can run: noise, steps, mechanisms, models, scripts, releases of single records."""
