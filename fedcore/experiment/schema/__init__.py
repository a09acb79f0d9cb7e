"""The tables of an experiment's configuration, and how each is checked."""
