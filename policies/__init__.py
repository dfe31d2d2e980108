"""The learning system: token-level multi-agent PPO on RLlib, rollouts, role exchange, generation backends."""
