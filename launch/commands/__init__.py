"""The commands, each a file of its own: arguments in, sentences out."""

COMMANDS = {
    "train": "Train a chain of language models; continue a run.",
    "tune": "Search over settings, such as the exchange period.",
    "study": "Compare trainings: arms over seeds, with what was found kept in small files.",
    "evaluate": "Measure a run's policies, or a model, beside the untouched base.",
    "plan": "Show where a run's processes would go, and whether they fit.",
    "watch": "Follow a run from another terminal.",
    "runs": "List runs: how each stands, and how far it has come.",
    "compare": "Show what sets runs apart, how they ended, and what they took.",
    "plot": "Draw the curves of a run.",
    "report": "Write one HTML file about any number of runs.",
    "generate": "Let the trained chain answer queries.",
    "serve": "Serve the trained policies, and their chain, by OpenAI's API.",
    "export": "Write a trained policy as a Hugging Face folder.",
    "validate": "Check a task's data, prompts and reward, without a model.",
    "submit": "Send a command to a Ray cluster as a job.",
    "jobs": "List a Ray cluster's jobs, show their output, stop them.",
}
