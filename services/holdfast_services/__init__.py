"""The services of Holdfast; they share the kernel ``holdfast.core`` and meet only on the wire."""
