"""Policy service: keeps the knobs of speculation, sends them to instances and explains decisions."""
