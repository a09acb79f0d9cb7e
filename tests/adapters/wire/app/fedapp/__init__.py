"""Digits over the wire: the app that the test deploys."""
