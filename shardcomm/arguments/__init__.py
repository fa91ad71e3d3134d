"""What callers give, checked at the door: types, numbers, dtypes, and arrays of other libraries."""
