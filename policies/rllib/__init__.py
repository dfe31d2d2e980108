"""The thin RLlib classes around learning."""
