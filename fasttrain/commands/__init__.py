"""What `fasttrain COMMAND ...` runs: a module for each command, with main(arguments) -> exit code.

A command reads its arguments, calls the library, and prints. What it does is done elsewhere.
"""
