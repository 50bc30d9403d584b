"""Runnable examples: real subjects on which the platform is shown and measured."""
