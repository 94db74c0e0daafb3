"""The commands of the command line, a file each; ``dpkern.cli`` puts them together."""
