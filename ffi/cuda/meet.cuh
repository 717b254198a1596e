// Arrive words: raised by one thread a peer, awaited by the same. For blocks of at least kMaxRanks
// threads.
#pragma once

#include "ffi/cuda/wait.cuh"

namespace symmkv {

// Loads one kernel onto the current device.
inline cudaError_t LoadKernel(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

__device__ inline void Arrive(const DeviceHeap& heap, uint64_t exchange, uint16_t fingerprint) {
  const uint32_t peer = threadIdx.x;
  if (peer >= heap.layout.geometry.cp_size || peer == heap.rank) return;
  // Release: what this rank published before, and what it read of the peer's staging, comes first.
  StoreRelease(&MailboxOf(heap, peer, heap.rank)->arrive, ArriveWord(exchange, fingerprint));
}

// By the first kMaxRanks threads, whole warps. False if the heap is poisoned.
__device__ inline bool AwaitArrivals(const DeviceHeap& heap, uint64_t exchange,
                                     uint16_t fingerprint, Phase phase) {
  const uint32_t source = threadIdx.x;
  const bool waits = source < heap.layout.geometry.cp_size && source != heap.rank;
  uint64_t word = 0;
  const bool all = WaitAll(heap, source, exchange, phase, [&] {
    if (!waits) return true;
    // Acquire: pairs with the release in the source's Arrive.
    word = LoadAcquire(&MailboxOf(heap, heap.rank, source)->arrive);
    return EpochOf(word) >= exchange;
  });
  if (!all) return false;
  // A source that is one exchange ahead has compared the words of this one (docs/protocol.md).
  if (!waits || EpochOf(word) != exchange || FingerprintOf(word) == fingerprint) return true;
  Fault fault = MakeFault(FaultCode::kDisagree, phase, source, exchange);
  fault.value = FingerprintOf(word);
  fault.bound = fingerprint;
  Fail(heap, fault);
  return false;
}

}  // namespace symmkv
