"""Row statistics of the logits: the few numbers per example from which every loss is computed."""
