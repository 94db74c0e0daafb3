"""The ground: what every other package may use, and which uses none of them."""
