"""Private names of Ray and RLlib that we use."""
