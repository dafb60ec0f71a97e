"""Without kda-tools installed (`nox --no-venv`) pytest does not find its plugin by itself."""

pytest_plugins = ["kda_tools.pytest_plugin"]
