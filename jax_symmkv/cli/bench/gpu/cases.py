"""What is measured on GPUs: the same cases on the JAX ranks and on torch's."""

from __future__ import annotations

from jax_symmkv.cli.bench.case import Case, make_full_page_case
from jax_symmkv.cli.bench.options import Options

# Exchanges in a program or a graph: the layers of a large model.
LAYERS = 61
# Of ranks that share a GPU: an exchange takes milliseconds then, since the GPU slices time.
SHARED_LAYERS = 4


def make_cases(job: Options, num_ranks: int) -> list[Case]:
    """One that only synchronises, then the sizes; of sizes that come to the same pages one."""
    cases = [make_full_page_case(nbytes, num_ranks) for nbytes in (0, *job.sizes_nbytes)]
    return list(dict.fromkeys(cases))
