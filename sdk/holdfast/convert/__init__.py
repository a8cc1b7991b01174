"""Checkpoints to and from other tools' files: safetensors, Hugging Face folders, DCP, torch.

``reading`` and the ``*_files`` modules each give a ``TensorSource``; ``exporting`` turns one into
files, ``importing`` into a Holdfast checkpoint, and ``copying`` moves Holdfast checkpoints from
one store to another. Memory is bounded by the largest tensor and a window, never by the
checkpoint. Nothing that is read is executed (P9).
"""
