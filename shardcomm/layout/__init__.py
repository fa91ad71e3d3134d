"""Where every element of a unit's parameters lives, and the views that show it."""
