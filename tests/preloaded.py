"""Preloaded imports of the fork server (`tests.forked`), with quiet libraries as in the `cory` command."""

from importlib import import_module

from launch.cluster.session import quiet_libraries

quiet_libraries(debug=False)
for _name in (
    *("policies.cory", "launch.commands.train", "launch.commands.evaluate", "launch.display.plot"),
    *("tests.policies.learning.test_mesh_fp64", "tests.policies.learning.test_saving"),
):
    import_module(_name)
