"""What an audit can run: noise kernels, private steps, releases of single records."""
