"""The files of a store's folder, and what they ask of the operating system."""
