"""The forward pass of a policy: which tokens it reads, and what becomes of the logits and hidden states."""
