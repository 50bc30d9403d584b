"""The services of Paceline: one folder each, and `platform` for what they share."""
