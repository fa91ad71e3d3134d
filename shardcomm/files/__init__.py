"""Files that other programs may read or have written: they are written whole or not at all, and read value by value."""
