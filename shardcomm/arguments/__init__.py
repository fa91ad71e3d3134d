"""Checks of what callers give: types, numbers, dtypes, and arrays of other libraries."""
