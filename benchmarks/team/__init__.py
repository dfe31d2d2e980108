"""A study on 6x6 Sudoku: what turns, feedback, a second LLM and role exchange add to a trained single agent."""
