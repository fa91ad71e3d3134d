"""Files that others read or wrote: written whole or not at all, read value by value."""
