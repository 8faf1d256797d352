"""Scripts that measure in a process of their own; run by path, they import nothing of ours."""
