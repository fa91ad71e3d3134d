"""Models known by name: the shapes of well-known ones, and the GPT that the commands train and plan."""
