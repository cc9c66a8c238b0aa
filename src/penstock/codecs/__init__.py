"""Compressors as training sees them: one header on every payload, hostile bytes refused, nothing lost silently."""
