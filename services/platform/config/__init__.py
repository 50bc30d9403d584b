"""Configuration of a service: flags over environment over file over defaults."""
