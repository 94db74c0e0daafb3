"""Training loops as users write them, each with what must happen to it."""
