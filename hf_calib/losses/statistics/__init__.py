"""Row statistics of the logits: the few numbers per example that every loss is made of."""
