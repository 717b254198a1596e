// Waiting for peers, and what ends a wait that comes to nothing.
//
//   poison  A fault is recorded once: the thread that turns HeapState::status from open to poisoned
//           writes it into HostWords, `failed` last (release). The host's watcher carries it to the
//           peers.
//   hear    The watcher sets `abort`, `died`, `closed` in pinned host memory. Reading it takes a
//           microsecond of PCIe, so waits look only after a while and seldom; the status, in device
//           memory, tells the other blocks.
#pragma once

#include "ffi/cuda/memory.cuh"

namespace symmkv {

constexpr int kPollsPerLook = 64;
constexpr uint64_t kFirstLookNs = 50'000;
constexpr unsigned kWholeWarp = 0xffffffff;

// The state as the kernels before left it, in two loads: every block wants this one line at once.
__device__ inline HeapState LoadState(const DeviceHeap& heap) {
  static_assert(offsetof(HeapState, published_epoch) == sizeof(uint4));
  const uint4* const from = reinterpret_cast<const uint4*>(heap.state);
  HeapState state;
  reinterpret_cast<uint4*>(&state)[0] = __ldcg(from);
  reinterpret_cast<uint4*>(&state)[1] = __ldcg(from + 1);
  return state;
}

__device__ inline uint32_t Status(const DeviceHeap& heap) {
  // Volatile: another block may change it while this one waits.
  return *const_cast<const volatile uint32_t*>(&heap.state->status);
}

__device__ inline Mailbox* MailboxOf(const DeviceHeap& heap, uint32_t owner, uint32_t source) {
  return reinterpret_cast<Mailbox*>(heap.slab[owner] + kMailboxesOffset) + source;
}

// Poisons the heap, with this fault unless another came first.
__device__ inline void Fail(const DeviceHeap& heap, const Fault& fault) {
  // Relaxed: the exchange only elects the writer; the release below publishes the record.
  if (atomicCAS(&heap.state->status, kOpen, kPoisoned) != kOpen) return;
  heap.host->fault = fault;
  __threadfence_system();
  *const_cast<volatile uint32_t*>(&heap.host->failed) = 1;
}

// Bit r: rank r has not arrived at the exchange.
__device__ inline uint64_t Missing(const DeviceHeap& heap, uint64_t exchange) {
  uint64_t missing = 0;
  for (uint32_t r = 0; r < heap.layout.geometry.cp_size; ++r) {
    if (r == heap.rank) continue;
    if (EpochOf(LoadAcquire(&MailboxOf(heap, heap.rank, r)->arrive)) < exchange)
      missing |= uint64_t{1} << r;
  }
  return missing;
}

// One lane's look at everything that could end its wait for `source`; true if the wait has ended.
__device__ inline bool WaitIsLost(const DeviceHeap& heap, uint32_t source, uint64_t exchange,
                                  Phase phase, uint64_t started_ns, bool source_was_lost) {
  const volatile HostWords* const host = heap.host;
  if (host->abort != 0) {
    atomicCAS(&heap.state->status, kOpen, kPoisoned);  // the peer's record says why
    return true;
  }
  Fault fault = MakeFault(FaultCode::kTimeout, phase, source, exchange);
  if (source_was_lost) {
    fault.code = (host->closed >> source & 1) != 0 ? FaultCode::kClosed : FaultCode::kDied;
  } else if (NowNs() - started_ns < heap.timeout_ns) {
    return false;
  }
  fault.missing = Missing(heap, exchange) | uint64_t{1} << source;
  Fail(heap, fault);
  return true;
}

// Waits, as a whole warp, until `arrived()` holds on every lane. A lane waits for rank `source`.
// False when the heap is poisoned.
template <class Arrived>
__device__ inline bool WaitAll(const DeviceHeap& heap, uint32_t source, uint64_t exchange,
                               Phase phase, Arrived arrived) {
  bool here = arrived();
  if (__all_sync(kWholeWarp, here)) return true;
  const uint64_t started_ns = NowNs();
  bool lost = false;  // the source, as of the last look
  for (int polls = 1;; ++polls) {
    here = here || arrived();
    if (__all_sync(kWholeWarp, here)) return true;
    if (polls % kPollsPerLook != 0 || NowNs() - started_ns < kFirstLookNs) continue;
    bool ended = Status(heap) != kOpen;
    // One lane looks at the host's memory for all, or a grid that waits would flood the bus.
    const unsigned waiting = __ballot_sync(kWholeWarp, !here);
    const unsigned bereft = __ballot_sync(kWholeWarp, !here && lost);
    const int looker = __ffs(static_cast<int>(bereft != 0 ? bereft : waiting)) - 1;
    const bool looks = static_cast<int>(threadIdx.x % 32) == looker;
    if (looks && !ended) ended = WaitIsLost(heap, source, exchange, phase, started_ns, lost);
    if (__any_sync(kWholeWarp, ended)) return false;
    // Acted upon in the next look: the source may have arrived, then died, since this one.
    uint64_t lost_ranks = 0;
    if (looks) {
      const volatile HostWords* const host = heap.host;
      lost_ranks = host->died | host->closed;
    }
    lost_ranks = __shfl_sync(kWholeWarp, lost_ranks, looker);
    lost = (lost_ranks >> source & 1) != 0;
    __nanosleep(200);
  }
}

}  // namespace symmkv
