"""The papers' formulas as printed, beside the exact ones; nothing here certifies anything."""
