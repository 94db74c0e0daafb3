"""One style for every figure: axes, colours, numbers, and the files that they are written to."""
