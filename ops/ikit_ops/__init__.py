"""What an agent can ask for: each public module is one family of operations.

The modules are thin: they take arguments, call the rooms beside them (checkpoint,
decode, ...), and put what was found into an evidence record.  Adding an operation is
adding one module here, and its test.
"""
