"""Reports of what private training costs, and what shows them."""
