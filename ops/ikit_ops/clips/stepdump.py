"""The contract ``clip-steps.v1``: what a video engine writes about every clip that it serves.

A diffusion model makes a clip in N steps.  Each step hands the latent ``x`` to the network,
gets a direction ``out`` (for flow matching: the velocity), and moves: ``x_next = x +
(sigma_next - sigma) * out``.  An engine that is fast because it skips work still shows
plausible frames, and comparing pixels cannot tell: honest changes of kernels move pixels as
much as cheating does.  The steps themselves can be checked, one at a time, from the very
``x`` that the engine had.  So the engine writes them down: for each latent stream ``s``
("video", "audio") and step ``i``, ``step.i.s.x``, ``.out``, ``.x_next``; ``final.s``; and
``sigma``, ``sigma_next`` [N] float64.  The file is a safetensors file named by the sha256 of
the mp4 that was answered, in the directory that ``CLIP_STEP_DUMP_DIR`` names, and it is there
before the answer is.

``StepRecorder`` writes such a file (``recorder``, which an engine may copy), ``DumpReader``
opens one without trusting it, and ``layout_problems`` says what in it is not as agreed.
"""

from ikit_ops.clips.layout import layout_problems, non_finite
from ikit_ops.clips.reader import DumpReader
from ikit_ops.clips.recorder import (
    FORMAT,
    REQUEST_FIELDS,
    VARIABLE,
    StepDumpError,
    StepRecorder,
    dump_path,
    request_of,
)

__all__ = [
    "FORMAT",
    "REQUEST_FIELDS",
    "VARIABLE",
    "DumpReader",
    "StepDumpError",
    "StepRecorder",
    "dump_path",
    "layout_problems",
    "non_finite",
    "request_of",
]
