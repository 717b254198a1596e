"""compose inside jit on GPUs: ranks as processes, which share one GPU where there is no second."""

from __future__ import annotations

import os
import time

import pytest

from tests.kernels.streams import require_gpu
from tests.registry import register_ci
from tests.run_rank import run_ranks_of

pytestmark = register_ci(suite="kernels-1-gpu", ranks=2, est_s=120)

# Every rank on GPU 0; room for both.
GPU_ENV = {
    "JAX_PLATFORMS": "cuda",
    "JAX_LOCAL_DEVICE_IDS": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
COMMAND_BUFFERS = {
    "default": "",
    "forced on": "--xla_gpu_graph_min_graph_size=1",
    "off": "--xla_gpu_enable_command_buffer=",
}


@pytest.fixture(autouse=True)
def gpu() -> None:
    require_gpu()


# --- on the ranks --------------------------------------------------------------------------------


def _heap(page, **options):
    import jax
    import numpy as np

    import jax_symmkv as symmkv
    from tests.reference import MAX_CURRENT_PAGES

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("cp",))
    options = {"max_current_pages": MAX_CURRENT_PAGES, "timeout_s": 60} | options
    return symmkv.SymmetricHeap(mesh, "cp", page=page, **options)


def check_compose(layers: int = 8) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import jax_symmkv as symmkv
    from tests.group import BODIES, assert_shards, by_rank, put, sharded
    from tests.reference import NUM_DENSE_PAGES, batches, composed, random_array

    def scanned(heap):
        def body(dense, plan):
            def layer(carry, _):
                return symmkv.compose(*carry[:1], plan, carry[1], heap=heap), None

            carry = (dense, symmkv.new_ticket(heap))
            return jax.lax.scan(layer, carry, None, length=layers)[0][0]

        return body

    def looped(heap):
        def body(dense, plan):
            def layer(state):
                dense, ticket, i = state
                return *symmkv.compose(dense, plan, ticket, heap=heap), i + 1

            state = (dense, symmkv.new_ticket(heap), jnp.int32(0))
            return jax.lax.while_loop(lambda state: state[2] < layers, layer, state)[0]

        return body

    def unrolled(heap):
        def body(dense, plan):
            ticket = symmkv.new_ticket(heap)
            for _ in range(layers):
                dense, ticket = symmkv.compose(dense, plan, ticket, heap=heap)
            return dense

        return body

    bodies = {k: v for k, v in BODIES.items() if k != "collective_compose"}
    bodies |= {"scan": scanned, "while": looped, "unrolled": unrolled}
    rng = np.random.default_rng(5)  # the same bytes on every rank
    for dtype, shape in (
        ("bfloat16", (4, 576)),
        ("uint8", (16,)),
        ("float8_e4m3fn", (16, 4096)),
        ("float32", (4, 16384)),
    ):
        page = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        with _heap(page) as heap:
            assert heap.transport == "cuda-ipc", heap
            for name, make in bodies.items():
                program = sharded(make(heap), heap, donate=True)
                for what, plan in batches(heap.cp_size, rng).items():
                    before = random_array(rng, (heap.cp_size * NUM_DENSE_PAGES, *shape), page.dtype)
                    after = composed(by_rank(before, heap.cp_size), plan).reshape(before.shape)
                    dense = put(before, heap.mesh, P("cp"))
                    plans = put(plan, heap.mesh, P())
                    assert_shards(program(dense, plans), after, f"{dtype}, {name}, {what}")
            heap.check()


def check_several_buffers() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from tests.group import assert_shards, by_rank, compose_body, put, sharded
    from tests.reference import NUM_DENSE_PAGES, batches, composed, random_array

    pages = (
        jax.ShapeDtypeStruct((64, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, 132), jnp.uint8),
    )
    rng = np.random.default_rng(6)
    with _heap(pages) as heap:
        program = sharded(compose_body(heap), heap)
        for what, plan in batches(heap.cp_size, rng).items():
            rows = heap.cp_size * NUM_DENSE_PAGES
            before = tuple(random_array(rng, (rows, *p.shape), p.dtype) for p in pages)
            after = tuple(composed(by_rank(b, heap.cp_size), plan).reshape(b.shape) for b in before)
            dense, plans = put(before, heap.mesh, P("cp")), put(plan, heap.mesh, P())
            assert_shards(program(dense, plans), after, what)
        heap.check()


def check_lost_rank() -> None:
    """Rank 1 dies; rank 0's exchange ends with an error that says so, in time."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import jax_symmkv as symmkv
    from tests.group import compose_body, put, sharded, synchronise
    from tests.reference import NUM_DENSE_PAGES, batches

    page = jax.ShapeDtypeStruct((64, 576), jnp.bfloat16)
    heap = _heap(page)
    program = sharded(compose_body(heap), heap)
    plan = put(batches(2, np.random.default_rng(7))["full"], heap.mesh, P())
    dense = put(np.zeros((2 * NUM_DENSE_PAGES, *page.shape), page.dtype), heap.mesh, P("cp"))
    jax.block_until_ready(program(dense, plan))
    synchronise("before the death")
    if jax.process_index() == 1:
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    result = jax.block_until_ready(program(dense, plan))
    assert time.monotonic() - started < 10
    with pytest.raises(symmkv.PeerError, match="rank 1 did not arrive") as caught:
        heap.check()
    assert caught.value.missing == (1,) and caught.value.phase == "exchange"
    current = np.asarray(plan.current_page)[np.asarray(plan.current_writer) == 1]
    lost = np.asarray(result.addressable_shards[0].data).view(np.uint8)[current]
    assert (lost == 0xFF).all(), "pages that never came must not look like data"
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1 did not arrive"):
        jax.block_until_ready(program(dense, plan))
    heap.close()
    os._exit(0)  # JAX's own shutdown waits for the dead rank


def check_closed_heap() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from tests.group import compose_body, put, sharded
    from tests.reference import NUM_DENSE_PAGES, batches

    page = jax.ShapeDtypeStruct((64, 576), jnp.bfloat16)
    heap = _heap(page)
    program = sharded(compose_body(heap), heap)
    plan = put(batches(2, np.random.default_rng(7))["full"], heap.mesh, P())
    dense = put(np.zeros((2 * NUM_DENSE_PAGES, *page.shape), page.dtype), heap.mesh, P("cp"))
    for _ in range(3):
        jax.block_until_ready(program(dense, plan))
    heap.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="is closed"):
        jax.block_until_ready(program(dense, plan))


def check_create_and_close(times: int) -> None:
    import jax
    import jax.numpy as jnp

    page = jax.ShapeDtypeStruct((64, 576), jnp.bfloat16)
    device = jax.local_devices()[0]
    for _ in range(times):
        with _heap(page) as heap:
            assert heap.transport == "cuda-ipc"
            assert heap.nbytes > 0
        del heap
    assert device.platform == "gpu"


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command_buffers", COMMAND_BUFFERS)
def test_compose(command_buffers: str) -> None:
    env = GPU_ENV | {"XLA_FLAGS": COMMAND_BUFFERS[command_buffers]}
    run_ranks_of(__file__, "check_compose", ranks=2, timeout_s=400, env=env)


def test_several_buffers() -> None:
    run_ranks_of(__file__, "check_several_buffers", ranks=2, timeout_s=200, env=GPU_ENV)


def test_lost_rank() -> None:
    run_ranks_of(__file__, "check_lost_rank", ranks=2, timeout_s=100, env=GPU_ENV, expect={1: -9})


def test_closed_heap() -> None:
    run_ranks_of(__file__, "check_closed_heap", ranks=2, timeout_s=100, env=GPU_ENV)


def test_create_and_close() -> None:
    run_ranks_of(__file__, "check_create_and_close", ranks=2, timeout_s=200, env=GPU_ENV, times=20)
