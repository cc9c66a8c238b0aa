"""Ranks are threads of one process here: each blocks a thread of XLA's while it waits for the others."""

import os

os.environ.setdefault("NPROC", "8")  # threads of XLA's, which takes as many as there are cores otherwise
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flag = "--xla_force_host_platform_device_count=3"  # for jax.lax.pmean
if flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
