"""Keep hints about coming batches and forward them to the bubble coordinator."""
