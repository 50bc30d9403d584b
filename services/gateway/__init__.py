"""The front door: takes batches of rollouts, places their samples on instances, hands them back once each."""
