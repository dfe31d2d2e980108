"""Runs programs that nobody has read, and finds out which tests they pass, so that no program can say so itself.

A program runs in a process of its own, shut in (`machine`), and so does what asks it (`tester`). Between the two only
plain data goes to and fro (`inside`): the tests' calls one way, what the program returned the other way. The tests are
evaluated where the program is not, so it can return wrong values, but not a verdict.
"""
