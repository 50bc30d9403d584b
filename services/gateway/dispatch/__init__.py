"""Place samples on instances and collect the tokens that they generate."""
