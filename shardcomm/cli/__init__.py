"""The commands: their options, what they do, and their pictures."""
