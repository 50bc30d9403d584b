"""How many instances there should be, and, where that is wanted, seeing to it through Kubernetes."""
