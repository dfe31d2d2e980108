"""Runs untrusted programs against tests, so that a program cannot forge the result.

The program (`worker`) and the tests (`tester`) run in two sandboxed processes (`machine`), which exchange only plain
data (`protocol`): the tests' calls in one direction, the program's return values in the other. The tests are evaluated
outside the program's process, so a program can return wrong values, but cannot report a test as passed. There it is
also described why a test fails (`failures`).
"""
