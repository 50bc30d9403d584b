"""What deciding knows: how long a step takes, and how that is found out."""
