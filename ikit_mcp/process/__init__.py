"""The process room: whatever this program starts is started, watched and ended here.

``run`` is the one way to start a child; ``environment`` says what a child gets to know,
``secrets`` what nobody else may, ``lock`` who may use a device, ``platform`` what only Linux
can tell.  Nothing in this room knows of operations, records or engines.
"""
