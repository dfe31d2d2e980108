"""A study of feedback between agents, on 6x6 Sudoku: design, runs, statistics."""
