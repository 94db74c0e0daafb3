"""Long proofs and measurements behind ``make evidence``; each module has ``run() -> dict``."""
