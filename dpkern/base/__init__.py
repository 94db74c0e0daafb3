"""What everything else stands on: how an op is declared, and what follows from it."""
