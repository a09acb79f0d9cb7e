"""A user's package, which imports only public names of fedcore; the tests put its folder on the path."""
