"""Training of many clients at once by batched products."""
