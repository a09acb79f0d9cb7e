"""The local work of many clients at once, as batched products."""
