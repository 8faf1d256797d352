"""Checkpoints as headers: which files hold a model, and what each tensor is and takes."""
