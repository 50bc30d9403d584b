"""Live migration of running samples between instances: the sample's KV goes along, nothing is computed again."""
