"""Several CPU devices in the process of the unit tests, for groups without spawning ranks."""

from __future__ import annotations

import jax

# Before anything uses a backend. Not JAX_PLATFORMS: tests of other suites may share the process.
jax.config.update("jax_num_cpu_devices", 8)
