"""Connect to instances and bring them to the published weights."""
