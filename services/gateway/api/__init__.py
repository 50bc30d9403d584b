"""Requests of trainers: checked, accepted, and answered with samples."""
