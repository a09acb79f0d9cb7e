"""The files of a store, and their system calls."""
