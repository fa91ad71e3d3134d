"""The commands, their options and their pictures."""
