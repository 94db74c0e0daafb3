"""Reports of what private training costs, and their tables and figures."""
